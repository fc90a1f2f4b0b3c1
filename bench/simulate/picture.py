"""The picture of a simulation: speed-up over dense exchange against ranks and bandwidth."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicomp.errors import ConfigurationError


def check_installed() -> None:
    """Raise now where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            "simulate: pictures need matplotlib; install it with pip install 'mpicomp[report]'"
        ) from None


def draw(path: str, rows: Sequence[dict[str, Any]], here: float) -> None:
    """Draw speed-ups against ranks and bandwidth, and the line on which compression stops to pay."""
    import matplotlib

    matplotlib.use("svg" if path.endswith(".svg") else "agg", force=False)
    from matplotlib import pyplot
    from matplotlib.colors import TwoSlopeNorm

    matplotlib.rcParams["svg.fonttype"] = "none"
    plans = list(dict.fromkeys(row["plan"] for row in rows))
    ranks = sorted({row["ranks"] for row in rows})
    bandwidths = sorted({row["bandwidth"] for row in rows})
    table = {(row["plan"], row["ranks"], row["bandwidth"]): math.log2(row["speedup"]) for row in rows}
    most = max(1.0, *table.values())
    least = min(-1.0, *table.values())
    figure, axes = pyplot.subplots(
        1, len(plans), figsize=(1.5 + 4.5 * len(plans), 4.2), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, plan in zip(axes[0], plans, strict=True):
        grid = np.array([[table[plan, rank, bandwidth] for rank in ranks] for bandwidth in bandwidths])
        mesh = axis.pcolormesh(
            ranks, bandwidths, grid, cmap="RdBu", norm=TwoSlopeNorm(0.0, least, most), shading="nearest"
        )
        if len(ranks) > 1 and grid.min() < 0 < grid.max():
            axis.contour(ranks, bandwidths, grid, levels=[0.0], colors="black", linewidths=2)
        axis.axhline(here, color="black", linewidth=0.8, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ranks, [f"{rank:,}" for rank in ranks], rotation=45)
        axis.set_xlabel("ranks")
        axis.set_title(plan)
    axes[0][0].set_ylabel("bits a second of a host's link")
    bar = figure.colorbar(mesh, ax=axes[0].tolist())
    ticks = range(math.floor(least), math.ceil(most) + 1)
    bar.set_ticks([tick for tick in ticks if least <= tick <= most])
    bar.ax.set_yticklabels([f"{2.0**tick:g}" for tick in ticks if least <= tick <= most])
    bar.set_label("speed-up over dense exchange")
    figure.suptitle("black line: beyond it compression stops to pay; dotted: the bandwidth of the table", fontsize=9)
    figure.savefig(path)
    pyplot.close(figure)
