"""The picture of ``mpicomp plan``: bars of the throughput that each exchange leaves, a group a network."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from mpicomp.bench.report.plots import STYLE

from mpicomp.errors import FileWriteError


def draw_plans(plans: Sequence[tuple[str, dict[str, Any]]], path: str) -> None:
    """Draw networks and their plans to a file, in the format that its name ends in."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(6.0, 2.5 * len(plans)), 4.0), layout="constrained")
        axes = figure.subplots()
        names = [row["exchange"] for row in plans[0][1]["rows"] if row["exchange"] != "none"]
        places, width = np.arange(len(plans)), 0.8 / len(names)
        for index, name in enumerate(names):
            shares = [next(row["throughput"] for row in found["rows"] if row["exchange"] == name) for _, found in plans]
            axes.bar(places + width * (index - (len(names) - 1) / 2), shares, width, label=name)
        axes.set_xticks(places, [label.replace(", ", "\n") for label, _ in plans])
        axes.set_ylabel("throughput, share of that without exchange")
        axes.set_ylim(0, 1.05)
        figure.legend(loc="outside upper center", ncols=4)
        try:
            figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
        except (OSError, ValueError) as error:
            raise FileWriteError(f"plan: '{path}' cannot be written: {error}") from error
