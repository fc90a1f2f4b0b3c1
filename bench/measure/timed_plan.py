"""A plan that was timed at full size: its row, and its lines in the text format of the OSU micro-benchmarks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

import numpy as np
from mpicomp.bench.measure.exchanges import (
    CHOOSING,
    COMPRESS,
    DECODE,
    EXCHANGE,
    MPI,
    SECONDS,
    SENT,
    WIRE,
    Plan,
    Runner,
)
from mpicomp.bench.measure.intervals import median_interval


class PlanRow(TypedDict):
    """A row of ``bench collectives``."""

    compressor: Annotated[str, "name; `none` for MPI's own sum"]
    ratio: Annotated[float | None, "kept fraction that was asked for; null where there is none"]
    collective: Annotated[str, "name, with its inner collective after a colon; `auto`; or `MPI_Allreduce`"]
    numel: Annotated[int, "length of the array"]
    ranks: Annotated[int, "that took part"]
    hosts: Annotated[int, "that they are on"]
    device: Annotated[str, "where gradients were: `cpu` or `gpu`"]
    route: Annotated[str | None, "how messages reached MPI from a GPU: `staged` or `direct`; null on the CPU"]
    median_s: Annotated[float | None, "median of the samples; null for a plan that was not run"]
    p95_s: Annotated[float | None, "95 % of the samples took no longer"]
    wire_bytes: Annotated[float | None, "that left a rank in an exchange, averaged over ranks"]
    predicted_s: Annotated[float | None, "median of the cost model's predictions before each sample"]
    speedup: Annotated[float | None, "`median_s` of the best dense plan over this one"]
    error: Annotated[float | None, "of the mean"]
    correct: Annotated[bool | None, "whether rounding explains it, and all ranks have the same bits"]
    low_s: Annotated[float | None, "lower end of the 95 % interval of the median"]
    high_s: Annotated[float | None, "its upper end"]
    p99_s: Annotated[float | None, "99 % of the samples took no longer"]
    samples: Annotated[int, "how many there are"]
    stopped: Annotated[str | None, "`interval`: the median is known well; `limit`: time was over; `once`: too slow"]
    span_s: Annotated[float | None, "median from the last rank's start to the last rank's end, as predicted"]
    rank_mean_s: Annotated[float | None, "mean over ranks of each rank's mean time"]
    rank_min_s: Annotated[float | None, "the least of them"]
    rank_max_s: Annotated[float | None, "the most"]
    compress_s: Annotated[float | None, "median, on each sample's slowest rank: up to the last round"]
    exchange_s: Annotated[float | None, "likewise: in rounds, waiting for others included"]
    decode_s: Annotated[float | None, "likewise: after them"]
    choosing_s: Annotated[float | None, "likewise: for choosing a plan and learning its seconds"]
    sent_bytes: Annotated[float | None, "payload that a rank handed to the transport, averaged over ranks"]
    gain: Annotated[float | None, "median of the retained share of energy"]
    algbw_gb_s: Annotated[float | None, "`4 numel / median_s`"]
    busbw_gb_s: Annotated[float | None, "that times `2 (ranks - 1) / ranks`"]
    wirebw_gb_s: Annotated[float | None, "`wire_bytes / median_s`"]
    first_predicted_s: Annotated[float | None, "prediction before the first run; null for `auto`"]
    chosen: Annotated[str | None, "the plan that `auto` ran most often; null for others, as the fields below"]
    best: Annotated[str | None, "the best fixed plan of those that `auto` may choose, no compression among them"]
    best_s: Annotated[float | None, "its median, timed in turn with `auto`"]
    regret: Annotated[float | None, "`median_s / best_s - 1`"]
    regret_low: Annotated[float | None, "lower end of its 95 % interval"]
    regret_high: Annotated[float | None, "its upper end"]
    best_dense: Annotated[str | None, "the best dense plan"]
    best_dense_s: Annotated[float | None, "its median, timed in turn where it is not three times slower than the best"]
    behind_dense: Annotated[float | None, "`median_s / best_dense_s - 1`"]
    mpi_s: Annotated[float | None, "median of `MPI_Allreduce`, timed in turn where it is not three times slower"]
    settings: Annotated[
        str | None, "settings that differ from other configurations of its compressor, but for the ratio"
    ]
    config: Annotated[dict[str, Any], "the compressor's configuration"]


@dataclass
class TimedPlan:
    """A plan that was timed, or was not worth it."""

    plan: Plan  # the plan that is timed
    numel: int
    ranks: int  # that took part
    hosts: int
    # Settings that tell its compressor from others of the same name; see `differing_settings`
    settings: str = ""
    device: str = "cpu"  # where gradients are, ``"cpu"`` or ``"gpu"``
    expected_s: float | None = None  # seconds that a cost model predicted before it was run
    runner: Runner | None = None  # record of its steps; None where it was not run
    first: int = 0  # the first of its steps that counts
    stopped: str | None = None  # reason for which the timing ended: ``"interval"``, ``"limit"`` or ``"once"``
    facts: dict[str, Any] = field(default_factory=dict)  # of ``auto``: further fields of its row

    @property
    def samples(self) -> list[float]:
        """Seconds of the steps that count, on the slowest rank."""
        return self.runner.slowest()[self.first :] if self.runner else []

    @property
    def median_s(self) -> float:
        """Their median, infinite where there are none."""
        return float(np.median(self.samples)) if self.runner else np.inf

    @property
    def title(self) -> str:
        ratio = getattr(self.plan.compressor, "ratio", None)
        at = "" if ratio is None else f" at {ratio:g}"
        which = f" ({self.settings})" if self.settings else ""
        exchange = "" if self.plan.collective == MPI else f"{self.plan.compressor.id}{at}{which}, "
        return f"{self.numel:,} elements, {exchange}{self.plan.collective}"

    @property
    def outcome(self) -> str:
        """The result in words: median, number of samples, and the reason for stopping."""
        number = len(self.samples)
        return f"{1e3 * self.median_s:.4g} ms, {number} {'sample' if number == 1 else 'samples'} ({self.stopped})"


def rows_of(timings: Sequence[TimedPlan], dense: Sequence[TimedPlan]) -> list[dict[str, Any]]:
    """Return the rows of plans; `Row` describes them."""
    base = min(timing.median_s for timing in dense)
    return [_row(timing, base) for timing in timings]


def _row(timing: TimedPlan, base: float) -> dict[str, Any]:
    plan, runner = timing.plan, timing.runner
    row: dict[str, Any] = dict.fromkeys(PlanRow.__annotations__) | {
        "compressor": "none" if plan.collective == MPI else plan.compressor.id,
        "ratio": getattr(plan.compressor, "ratio", None),
        "collective": plan.collective,
        "numel": timing.numel,
        "ranks": timing.ranks,
        "hosts": timing.hosts,
        "device": timing.device,
        "route": None if runner is None else runner.route,
        "samples": 0,
        "predicted_s": timing.expected_s,
        "first_predicted_s": timing.expected_s,
        "settings": timing.settings or None,
        "config": plan.compressor.get_config(),
    }
    return row | ({} if runner is None else _measured(timing, runner, base)) | timing.facts


def _measured(timing: TimedPlan, runner: Runner, base: float) -> dict[str, Any]:
    steps = np.array(runner.steps[timing.first :])  # steps, ranks, fields
    seconds = timing.samples
    slowest = steps[np.arange(len(steps)), steps[:, :, SECONDS].argmax(axis=1)]
    phases = np.median(slowest, axis=0)
    median = timing.median_s
    p95, p99 = (float(np.percentile(seconds, share, method="inverted_cdf")) for share in (95, 99))
    low, high = median_interval(seconds) or (None, None)
    of_ranks = steps[:, :, SECONDS].mean(axis=0)
    wire = float(np.median(steps[:, :, WIRE].mean(axis=1)))
    algbw = 4 * timing.numel / median / 1e9
    predictions = [value for value in runner.predicted[timing.first : len(runner.steps)] if value is not None]
    gains = [value for value in runner.gains[timing.first : len(runner.steps)] if value is not None]
    return {
        "median_s": median,
        "p95_s": p95,
        "wire_bytes": wire,
        "predicted_s": float(np.median(predictions)) if predictions else None,
        "speedup": base / median,
        "error": max((check.error for check in runner.checks), default=None),
        "correct": all(check.correct for check in runner.checks) if runner.checks else None,
        "low_s": low,
        "high_s": high,
        "p99_s": p99,
        "samples": len(seconds),
        "stopped": timing.stopped,
        "span_s": float(np.median(runner.spans()[timing.first :])),
        "rank_mean_s": float(of_ranks.mean()),
        "rank_min_s": float(of_ranks.min()),
        "rank_max_s": float(of_ranks.max()),
        "compress_s": float(phases[COMPRESS]),
        "exchange_s": float(phases[EXCHANGE]),
        "decode_s": float(phases[DECODE]),
        "choosing_s": float(phases[CHOOSING]),
        "sent_bytes": float(np.median(steps[:, :, SENT].mean(axis=1))),
        "gain": float(np.median(gains)) if gains else None,
        "algbw_gb_s": algbw,
        "busbw_gb_s": algbw * 2 * (timing.ranks - 1) / timing.ranks,
        "wirebw_gb_s": wire / median / 1e9,
    }


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each configuration the settings in which it differs from others of the same compressor, ratio aside.

    >>> lgc = {"id": "lgc", "ratio": 0.01, "signs": True, "instance": "ring"}
    >>> differing_settings([lgc, {**lgc, "signs": False}, {**lgc, "ratio": 0.1}, {"id": "topk", "ratio": 0.01}])
    ['signs=True', 'signs=False', 'signs=True', '']
    """
    words = []
    for config in configs:
        others = [other for other in configs if other["id"] == config["id"]]
        names = [name for name in config if name != "ratio" and any(other[name] != config[name] for other in others)]
        words.append(", ".join(f"{name}={config[name]}" for name in names))
    return words


_OSU_WIDTH = 18  # of OSU's columns of latencies; sizes have 10 and iterations 12
_TIME_COLUMNS = (
    "Median(us)",
    "P95(us)",
    "P99(us)",
    "Wire(bytes)",
    "Ratio",
    "algbw(GB/s)",
    "busbw(GB/s)",
    "wirebw(GB/s)",
)
_LAST_COLUMNS = ("Speed-up", "Error")

OSU_HEADER = (
    "# Size    "
    + "".join(name.rjust(_OSU_WIDTH) for name in ("Avg Latency(us)", "Min Latency(us)", "Max Latency(us)"))
    + "Iterations".rjust(12)
)
"""OSU's line, with the columns of its full statistics."""


def osu_blocks(rows: Sequence[Mapping[str, Any]], where: str) -> str:
    """Lay out rows of ``mpicomp bench collectives`` as OSU does, a block for each plan, with columns of ours behind."""
    plans: dict[tuple[str, Any, str | None, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["median_s"] is not None:
            plan = row["compressor"], row["ratio"], row["settings"], row["collective"]
            plans.setdefault(plan, []).append(row)
    lines = []
    for (compressor, ratio, settings, collective), of_plan in plans.items():
        at = "" if ratio is None else f" at ratio {ratio:g}"
        which = "" if settings is None else f" ({settings})"
        exchange = collective if collective == MPI else f"mpicomp {compressor}{at}{which}, {collective}"
        lines += [f"# {exchange}: float32, {where}"]
        lines += [OSU_HEADER + "".join(name.rjust(14) for name in (*_TIME_COLUMNS, *_LAST_COLUMNS))]
        lines += [_osu_line(row) for row in sorted(of_plan, key=lambda row: int(row["numel"]))]
        lines += [""]
    return "\n".join(lines)


def _osu_line(row: Mapping[str, Any]) -> str:
    size = f"{4 * row['numel']:<10d}"
    latencies = "".join(f"{1e6 * row[name]:{_OSU_WIDTH}.2f}" for name in ("rank_mean_s", "rank_min_s", "rank_max_s"))
    ours = [f"{1e6 * row[name]:.2f}" for name in ("median_s", "p95_s", "p99_s")]
    ours += [f"{row['wire_bytes']:.0f}", "-" if row["ratio"] is None else f"{row['ratio']:g}"]
    ours += [f"{row[name]:.4f}" for name in ("algbw_gb_s", "busbw_gb_s", "wirebw_gb_s")]
    ours += ["-" if row["speedup"] is None else f"{row['speedup']:.2f}"]
    ours += ["-" if row["error"] is None else f"{row['error']:.1e}"]
    return size + latencies + f"{row['samples']:12d}" + "".join(cell.rjust(14) for cell in ours)
