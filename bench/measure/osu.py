"""Output in the text format of the OSU micro-benchmarks, so that programs that read theirs read ours."""

from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH = 18  # of OSU's columns of latencies; sizes have 10 and iterations 12
_MORE = ("Median(us)", "P95(us)", "P99(us)", "Wire(bytes)", "Ratio", "algbw(GB/s)", "busbw(GB/s)", "wirebw(GB/s)")
_LAST = ("Speed-up", "Error")

HEADER = (
    "# Size    "
    + "".join(name.rjust(_WIDTH) for name in ("Avg Latency(us)", "Min Latency(us)", "Max Latency(us)"))
    + "Iterations".rjust(12)
)
"""OSU's line, with the columns of its full statistics."""


def blocks(rows: Sequence[Mapping[str, Any]], where: str) -> str:
    """Lay out rows of ``mpicomp bench collectives``: a block for each plan, a line for each size.

    Latencies are OSU's: the mean, least and most over ranks of each rank's mean. Columns of ours come after OSU's.
    """
    plans: dict[tuple[str, Any, str | None, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["median_s"] is not None:
            plan = row["compressor"], row["ratio"], row["settings"], row["collective"]
            plans.setdefault(plan, []).append(row)
    lines = []
    for (compressor, ratio, settings, collective), own in plans.items():
        at = "" if ratio is None else f" at ratio {ratio:g}"
        which = "" if settings is None else f" ({settings})"
        lines += [f"# mpicomp {compressor}{at}{which}, {collective}: float32, {where}"]
        lines += [HEADER + "".join(name.rjust(14) for name in (*_MORE, *_LAST))]
        lines += [_line(row) for row in sorted(own, key=lambda row: int(row["numel"]))]
        lines += [""]
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    size = f"{4 * row['numel']:<10d}"
    latencies = "".join(f"{1e6 * row[name]:{_WIDTH}.2f}" for name in ("rank_mean_s", "rank_min_s", "rank_max_s"))
    ours = [f"{1e6 * row[name]:.2f}" for name in ("median_s", "p95_s", "p99_s")]
    ours += [f"{row['wire_bytes']:.0f}", "-" if row["ratio"] is None else f"{row['ratio']:g}"]
    ours += [f"{row[name]:.4f}" for name in ("algbw_gb_s", "busbw_gb_s", "wirebw_gb_s")]
    ours += ["-" if row["speedup"] is None else f"{row['speedup']:.2f}"]
    ours += ["-" if row["error"] is None else f"{row['error']:.1e}"]
    return size + latencies + f"{row['samples']:12d}" + "".join(cell.rjust(14) for cell in ours)
