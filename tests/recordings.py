"""Files as train writes them with --json and --metrics, made up: any number of steps, layers, buckets and ranks."""

import json
import math
from itertools import pairwise

import numpy as np

PHASES = ("compute", "compress", "exchange", "decode", "update", "other")
SHARES = dict(zip(PHASES, (0.4, 0.1, 0.3, 0.05, 0.1, 0.05), strict=True))
CONFIG = {"id": "topk", "ratio": 0.01, "layers": None, "wire": None, "indices": "auto"}


def line(step, layers, buckets, rng, *, step_s=0.02, ratio=0.01, loss=None, quality=None):
    phases = {name: step_s * share for name, share in SHARES.items()}
    phases["exchange"] *= float(rng.lognormal(0, 0.3))
    parts = [
        {"name": f"blocks.{place}.weight", "numel": 1000 + place, "ratio": float(kept), "gain": float(kept**0.3)}
        for place, kept in enumerate(np.clip(ratio * rng.lognormal(0, 1, layers), 1e-6, 1))
    ]
    cut = np.linspace(0, layers, buckets + 1).astype(int)
    return {
        "schema": 1,
        "step": step,
        "seconds": sum(phases.values()),
        "phases_s": phases,
        "lr": 0.1,
        "skipped": False,
        "agreed": step == 0,
        "lost_ranks": [],
        "choosing_s": 0.0001,
        "once_wire_bytes": 0.0,
        "overhead_bytes": 100,
        "overhead_wire_bytes": 100.0,
        "sent_bytes": 2000,
        "wire_bytes": 2000.0 * buckets,
        "dense_wire_bytes": 8000.0 * layers,
        "buckets": [
            bucket(place, parts[first:end], phases, ratio, float(rng.lognormal(0, 0.2)), buckets)
            for place, (first, end) in enumerate(pairwise(cut))
        ],
        "loss": 2.3 * math.exp(-step / 40) + 0.1 if loss is None else loss,
        "quality": quality,
    }


def bucket(place, parts, phases, ratio, energy, buckets):
    return {
        "bucket": place,
        "parameters": len(parts),
        "numel": sum(part["numel"] for part in parts),
        "compressor": CONFIG | {"ratio": ratio},
        "collective": "allgather",
        "reason": "auto: least predicted seconds of 7 plans",
        "ratio": ratio,
        "ratio_reached": ratio,
        "gain": 0.25,
        "phases_s": {name: phases[name] / buckets for name in ("compress", "exchange", "decode")},
        "predicted_s": 0.008 / buckets,
        "predicted_phases_s": {"kernels": 0.002 / buckets, "exchange": 0.006 / buckets},
        "sent_bytes": 2000,
        "wire_bytes": 2000.0,
        "dense_wire_bytes": 8000.0,
        "rounds": ["allgatherv"],
        "energy": energy,
    }


def write_lines(path, steps, layers=8, buckets=1, seed=0, every=10, change=None, **words):
    """Write a file of --metrics; ``change(step, line)`` may alter a line before that."""
    rng = np.random.default_rng(seed)
    with open(path, "w") as file:
        for step in range(steps):
            quality = 1 - 0.9 * math.exp(-(step + 1) / 30) if (step + 1) % every == 0 else None
            record = line(step, layers, buckets, rng, quality=quality, **words)
            if change is not None:
                change(step, record)
            file.write(json.dumps(record) + "\n")


def write_outcome(path, steps, **fields):
    path.write_text(json.dumps(outcome(steps, **fields)))


def outcome(steps, ranks=2, layers=8, step_s=0.02, quality=0.95, **fields):
    return {
        "schema": 1,
        "task": "digits",
        "shard": 1,
        "compressor": "topk",
        "compressor_config": CONFIG,
        "ratio": 0.01,
        "collective": "allgather",
        "exchange": "gradients",
        "updates": None,
        "lr_scale": 1.0,
        "policy": "static",
        "policy_config": {"id": "static"},
        "warmup": 0,
        "ranks": ranks,
        "hosts": ranks,
        "steps": steps,
        "resumed_at": 0,
        "seed": 0,
        "parameters": 1000 * layers,
        "quality": {"name": "held-out accuracy", "value": quality, "better": "higher"},
        "median_step_s": step_s,
        "phases_s": {name: step_s * share for name, share in SHARES.items()},
        "choosing_s": 0.0001,
        "exchange_s": 0.005,
        "dense_exchange_s": 0.05,
        "dense_collective": "ring",
        "dense_step_s": 0.065,
        "slowest_rank": 1,
        "slowest_costs_s": 0.0001,
        "gain": 0.25,
        "delay": 3.0,
        "ratios": {"median": 0.01, "least": 0.01, "most": 0.01},
        "plans": [
            {"compressor": "topk", "compressor_config": CONFIG, "ratio": 0.01, "collective": "allgather", "share": 1.0}
        ],
        "sent_bytes": 2000 * steps,
        "wire_bytes": 2000 * steps,
        "dense_wire_bytes": 64000 * steps,
        "dense_bytes": 4000 * layers * steps,
        "once_bytes": 1000,
        "verdict": "compression paid in seconds: a step took 0.020 s; delay 3 steps",
        **fields,
    }
