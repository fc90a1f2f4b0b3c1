"""What ``collective="auto"`` costs over the best fixed plan, cell by cell: rows of ``bench collectives``, summed up."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_SHORT_S = 5e-3  # cells of which a share is too little to be measured
_BEHIND_S, _BEHIND = 200e-6, 0.03  # of the best dense plan: in seconds for those, else as a share


def judged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give rows with what their cells come to.

    Parameters
    ----------
    rows : sequence of mapping
        Of one network.

    Returns
    -------
    list of dict
        The rows; those of ``auto`` have ``prediction_error``, the median over all plans of the cell, and ``is_behind``,
        whether it is behind the best dense plan by more than the measurement explains. None elsewhere.
    """
    found = []
    for row in rows:
        own: dict[str, Any] = {"prediction_error": None, "is_behind": None}
        if row["chosen"] is not None:
            errors = prediction_errors([other for other in rows if _same_cell(other, row)])
            behind_s = row["median_s"] - row["best_dense_s"]
            most_s = _BEHIND_S if row["median_s"] < _SHORT_S else _BEHIND * row["best_dense_s"]
            own = {"prediction_error": float(np.median(errors)) if errors else None, "is_behind": behind_s > most_s}
        found.append(dict(row) | own)
    return found


def _same_cell(other: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    same = other["compressor"] == "dense" or other["config"] == row["config"]
    return bool(other["numel"] == row["numel"] and same)


def prediction_errors(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Give ``|predicted - measured| / measured`` of every plan that was run and predicted.

    Predicted and measured is what lies between the last rank's start and the last rank's end.

    Examples
    --------
    >>> prediction_errors([{"predicted_s": said, "span_s": 1.0} for said in (0.5, 1.25, None)])
    [0.5, 0.25]
    """
    pairs = [(row["predicted_s"], row["span_s"]) for row in rows]
    return [abs(said / took - 1) for said, took in pairs if said is not None and took is not None]


def summary(cells: Sequence[Mapping[str, Any]], errors: Sequence[float]) -> list[str]:
    """Say in lines what a grid came to.

    Parameters
    ----------
    cells : sequence of mapping
        Rows of ``auto`` from `judged`, of all networks.
    errors : sequence of float
        From `prediction_errors`, of all rows.
    """
    regrets = [cell["regret"] for cell in cells]
    worst = max(cells, key=lambda cell: float(cell["regret"]))
    sure = max((cell["regret_low"] for cell in cells if cell["regret_low"] is not None), default=None)
    lines = [
        f"cells: {len(cells)}",
        f"regret over the best fixed plan: median {np.median(regrets):+.1%}, worst {worst['regret']:+.1%} "
        f"({worst['bandwidth']}, {worst['latency']}, {worst['numel']:,} elements, ratio {worst['ratio']})",
    ]
    if sure is not None:
        lines.append(f"worst lower end of an interval of regret: {sure:+.1%}")
    behind = sum(cell["is_behind"] for cell in cells)
    lines.append(
        f"behind the best dense plan by more than {_BEHIND:.0%}, or {1e6 * _BEHIND_S:.0f} us in cells under "
        f"{1e3 * _SHORT_S:.0f} ms: {behind} of {len(cells)}"
    )
    if errors:
        lines.append(f"predicted against measured seconds: median error {np.median(errors):.1%} of {len(errors)} rows")
    return lines
