"""A plan that was timed at full size: its row, and its lines in the text format of the OSU micro-benchmarks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict, get_type_hints

import numpy as np
from mpicomp.bench.measure.exchanges import (
    CHOOSING,
    COMPRESS,
    DECODE,
    END,
    EXCHANGE,
    MPI,
    SECONDS,
    SENT,
    START,
    WIRE,
    Plan,
    Runner,
)
from mpicomp.bench.measure.intervals import median_interval

from mpicomp.compressors import Compressor


class _Mean(TypedDict):
    """The plan, its seconds and its mean."""

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


class _Samples(_Mean):
    """The samples, the phases and the bytes."""

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


class PlanRow(_Samples):
    """A row of ``bench collectives``."""

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
    settings: Annotated[str | None, "the compressor's settings that are not the default, but for the ratio"]
    config: Annotated[dict[str, Any], "the compressor's configuration"]


def settings_of(compressor: Compressor) -> str:
    """Return the settings that are not the default, but for the ratio, in words."""
    usual = type(compressor)().get_config()
    config = compressor.get_config().items()
    return ", ".join(f"{name}={value}" for name, value in config if name != "ratio" and value != usual[name])


@dataclass
class TimedPlan:
    """A plan that was timed, or was not worth it."""

    plan: Plan
    numel: int
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
        exchange = "" if self.plan.collective == MPI else f"{_title(self.plan.compressor)}, "
        return f"{self.numel:,} elements, {exchange}{self.plan.collective}"

    @property
    def outcome(self) -> str:
        """The result in words: median, number of samples, and the reason for stopping."""
        number = len(self.samples)
        return f"{1e3 * self.median_s:.4g} ms, {number} {'sample' if number == 1 else 'samples'} ({self.stopped})"


def _title(compressor: Compressor) -> str:
    ratio, settings = getattr(compressor, "ratio", None), settings_of(compressor)
    return compressor.id + ("" if ratio is None else f" at ratio {ratio:g}") + (f" ({settings})" if settings else "")


def rows_of(timings: Sequence[TimedPlan], dense: Sequence[TimedPlan], where: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of plans, which `PlanRow` describes; ``where`` has their ranks, hosts and device."""
    base = min(timing.median_s for timing in dense)
    rows = []
    for timing in timings:
        plan, runner = timing.plan, timing.runner
        row: dict[str, Any] = dict.fromkeys(get_type_hints(PlanRow)) | {
            "compressor": "none" if plan.collective == MPI else plan.compressor.id,
            "ratio": getattr(plan.compressor, "ratio", None),
            "collective": plan.collective,
            "numel": timing.numel,
            **where,
            "samples": 0,
            "predicted_s": timing.expected_s,
            "settings": settings_of(plan.compressor) or None,
            "config": plan.compressor.get_config(),
        }
        if runner is not None:
            row |= _measured(timing, runner, base, where["ranks"])
        rows.append(row | timing.facts)
    return rows


def _measured(timing: TimedPlan, runner: Runner, base: float, ranks: int) -> dict[str, Any]:
    steps = np.array(runner.steps[timing.first :])  # steps, ranks, fields
    seconds, median = timing.samples, timing.median_s
    slowest = steps[np.arange(len(steps)), steps[:, :, SECONDS].argmax(axis=1)]
    phases = np.median(slowest, axis=0)
    p95, p99 = (float(np.percentile(seconds, share, method="inverted_cdf")) for share in (95, 99))
    low, high = median_interval(seconds) or (None, None)
    of_ranks = steps[:, :, SECONDS].mean(axis=0)
    spans = steps[:, :, END].max(axis=1) - steps[:, :, START].max(axis=1)
    wire = float(np.median(steps[:, :, WIRE].mean(axis=1)))
    algbw = 4 * timing.numel / median / 1e9
    ran = runner.ran[timing.first : len(runner.steps)]
    predictions = [step.predicted_s for step in ran if step.predicted_s is not None]
    gains = [step.gain for step in ran if step.gain is not None]
    return {
        "route": runner.route,
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
        "span_s": float(np.median(spans)),
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
        "busbw_gb_s": algbw * 2 * (ranks - 1) / ranks,
        "wirebw_gb_s": wire / median / 1e9,
    }


_OSU_WIDTH = 18  # of OSU's columns of latencies; sizes have 10 and iterations 12
_COLUMNS = (
    *("Median(us)", "P95(us)", "P99(us)", "Wire(bytes)", "Ratio"),
    *("algbw(GB/s)", "busbw(GB/s)", "wirebw(GB/s)", "Speed-up", "Error"),
)
_LATENCIES = ("Avg Latency(us)", "Min Latency(us)", "Max Latency(us)")
OSU_HEADER = f"# Size    {''.join(name.rjust(_OSU_WIDTH) for name in _LATENCIES)}  Iterations"
"""OSU's line, with the columns of its full statistics."""


def osu_blocks(timed_rows: Sequence[Mapping[str, Any]], where: str) -> str:
    """Lay out rows of ``mpicomp bench collectives`` as OSU does, a block for each plan, with columns of ours behind."""
    plans: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in timed_rows:
        if row["median_s"] is not None:
            plan = row["compressor"], row["ratio"], row["settings"], row["collective"]
            plans.setdefault(plan, []).append(row)
    lines = []
    for (compressor, ratio, settings, collective), of_plan in plans.items():
        at = "" if ratio is None else f" at ratio {ratio:g}"
        which = "" if settings is None else f" ({settings})"
        exchange = collective if collective == MPI else f"mpicomp {compressor}{at}{which}, {collective}"
        lines += [f"# {exchange}: float32, {where}"]
        lines += [OSU_HEADER + "".join(name.rjust(14) for name in _COLUMNS)]
        for row in sorted(of_plan, key=lambda row: int(row["numel"])):
            latencies = (f"{1e6 * row[f'rank_{name}_s']:{_OSU_WIDTH}.2f}" for name in ("mean", "min", "max"))
            ours = [f"{1e6 * row[name]:.2f}" for name in ("median_s", "p95_s", "p99_s")]
            ours += [f"{row['wire_bytes']:.0f}", "-" if ratio is None else f"{ratio:g}"]
            ours += [f"{row[name]:.4f}" for name in ("algbw_gb_s", "busbw_gb_s", "wirebw_gb_s")]
            ours += [f"{row['speedup']:.2f}", "-" if row["error"] is None else f"{row['error']:.1e}"]
            cells = "".join(cell.rjust(14) for cell in ours)
            lines += [f"{4 * row['numel']:<10d}{''.join(latencies)}{row['samples']:12d}{cells}"]
        lines += [""]
    return "\n".join(lines)
