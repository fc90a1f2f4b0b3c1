"""The table of learned codes: quality, bytes, seconds and correlation of gradients, over seeds."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

import comparison
from comparison import DENSE, Training
from learned_bytes import coded_bytes
from learned_runs import GOALS, RATIOS, Finished, Runner
from mpicomp.bench.measure.jobs import DONE
from mpicomp.bench.measure.seed_means import cell, finite, mean

from mpicomp import LGC

_TOPK = "topk"  # whose bytes are what others are fewer than

_MEANS = (
    "quality",
    "difference",
    "sent_bytes",
    "wire_bytes",
    "kernels_s",
    "step_s",
    "error_first",
    "error_last",
    "code_error",
    "correlation",
    "share",
    "control_share",
)
"""Values of a seed of which a row has mean and deviation."""


class LearnedRow(TypedDict):
    """A row of ``learned``."""

    task: Annotated[str, "what was trained"]
    exchange: Annotated[str, "above"]
    ratio: Annotated[float | None, "kept fraction; null where there is none"]
    ranks: Annotated[int, "of each training"]
    steps: Annotated[int | None, "of each; null where none was done"]
    seeds: Annotated[int, "whose trainings were done"]
    quality: Annotated[float | None, "on all held-out data, after all steps"]
    quality_deviation: Annotated[float | None, ""]
    difference: Annotated[float | None, "from that of dense with the same seed"]
    difference_deviation: Annotated[float | None, ""]
    sent_bytes: Annotated[float | None, "of a step: payload of the whole model that rank 0 handed to the transport"]
    sent_bytes_deviation: Annotated[float | None, ""]
    wire_bytes: Annotated[float | None, "of a step: what left rank 0 for the whole model"]
    wire_bytes_deviation: Annotated[float | None, ""]
    kernels_s: Annotated[float | None, "of the median step: what rank 0 computed for the exchange"]
    kernels_s_deviation: Annotated[float | None, ""]
    step_s: Annotated[float | None, "median step of rank 0"]
    step_s_deviation: Annotated[float | None, ""]
    error_first: Annotated[float | None, "`code_error` in the first tenth of the steps in which the code was learnt"]
    error_first_deviation: Annotated[float | None, ""]
    error_last: Annotated[float | None, "in the last tenth of them"]
    error_last_deviation: Annotated[float | None, ""]
    code_error: Annotated[float | None, "in the steps in which codes travelled, as far as rank 0 can tell"]
    code_error_deviation: Annotated[float | None, ""]
    correlation: Annotated[float | None, "of ranks' gradients in this training"]
    correlation_deviation: Annotated[float | None, ""]
    share: Annotated[float | None, "of their entropy that is mutual information"]
    share_deviation: Annotated[float | None, ""]
    control_share: Annotated[float | None, "the same where nothing is shared"]
    control_share_deviation: Annotated[float | None, ""]
    is_within: Annotated[bool | None, "whether the mean quality is within its limit; null where dense lacks a seed"]
    once_bytes: Annotated[float | None, "that left rank 0 once in the run, beyond those of dense: the code"]
    coded_numel: Annotated[int | None, "of the layers that a code covers"]
    coded_sent_bytes: Annotated[float | None, "of these layers in a step: payload of a rank, mean over ranks"]
    coded_least_bytes: Annotated[float | None, "of the rank that has least"]
    coded_wire_bytes: Annotated[float | None, "of these layers in a step: what leaves a rank, mean over ranks"]
    sent_fewer: Annotated[float | None, "`coded_sent_bytes` of `topk` over these"]
    least_fewer: Annotated[float | None, "`coded_sent_bytes` of `topk` over `coded_least_bytes`"]
    wire_fewer: Annotated[float | None, "`coded_wire_bytes` of `topk` over these"]
    error: Annotated[str | None, "the first error of its runs, or how many were cut"]


class LearnedRun(TypedDict):
    """A training of ``learned``."""

    task: Annotated[str, "what was trained"]
    exchange: Annotated[str, "above"]
    seed: Annotated[int, "of the model, the batches and the schemes"]
    words: Annotated[list[str], "after `mpicomp`, without files"]
    status: Annotated[str, "`done`, `failed` or `cut`"]
    error: Annotated[str | None, "last line of the error"]
    kept: Annotated[bool, "whether its files were there before"]
    seconds: Annotated[float, "that the run took, when it was run"]
    quality: Annotated[float | None, "on all held-out data, after all steps; null where it is not done, as all below"]
    late: Annotated[dict[str, Any] | None, "of the steps in which codes travel, above"]
    error_first: Annotated[float | None, "as in a row"]
    error_last: Annotated[float | None, "as in a row"]
    once_bytes: Annotated[int | None, "that left rank 0 once in the run, first parameters among them"]
    correlation: Annotated[dict[str, Any] | None, "as in the object of `train --json`"]


class Table(comparison.Table):
    """A row for each task and exchange of what a runner has run so far."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def rows(self) -> list[dict[str, Any]]:
        """See `comparison.Table`."""
        finished = self._runner.finished
        rows = []
        for task in dict.fromkeys(run.task for run in finished):
            own = [run for run in finished if run.task == task]
            found = [_row(task, name, self._runner) for name in dict.fromkeys(run.arm for run in own)]
            topk = next((row for row in found if row["exchange"] == _TOPK), None)
            for row in found:
                row |= _fewer(row, topk)
                row["error"] = comparison.problem([finished[run] for run in own if run.arm == row["exchange"]])
            rows += found
        return rows

    def told(self, finished: Finished) -> dict[str, Any]:
        """See `comparison.Table`."""
        done, run = finished.status == DONE, finished.run
        return {
            "task": run.task,
            "exchange": run.arm,
            "seed": run.seed,
            **comparison.ending(finished),
            "quality": finite(finished.quality) if done else None,
            "late": finished.late if done else None,
            "error_first": finished.errors[0] if done else None,
            "error_last": finished.errors[1] if done else None,
            "once_bytes": finished.outcome["once_bytes"] if done else None,
            "correlation": finished.outcome["correlation"] if done else None,
        }

    def title(self, row: Mapping[str, Any]) -> str:
        """See `comparison.Table`."""
        task = row["task"]
        return f"{task}, {row['ranks']} ranks, ratio {RATIOS[task]}; {GOALS[task].better}"

    def cells(self, row: Mapping[str, Any]) -> dict[str, str]:
        """See `comparison.Table`."""

        def plain(name: str, form: str, scale: float = 1.0) -> str:
            return "-" if row[name] is None else format(row[name] / scale, form)

        learning = "-" if row["error_first"] is None else f"{row['error_first']:.3f} to {plain('error_last', '.3f')}"
        return {
            "exchange": row["exchange"],
            "quality": cell(row, "quality", ".4f"),
            "difference": cell(row, "difference", "+.4f"),
            "within": {None: "-", True: "yes", False: "no"}[row["is_within"]],
            "coded_kB": plain("coded_sent_bytes", ".4g", 1e3),
            "fewer": plain("sent_fewer", ".2f"),
            "least_kB": plain("coded_least_bytes", ".4g", 1e3),
            "fewer_least": plain("least_fewer", ".2f"),
            "coded_wire_kB": plain("coded_wire_bytes", ".4g", 1e3),
            "fewer_wire": plain("wire_fewer", ".2f"),
            "wire_kB": plain("wire_bytes", ".4g", 1e3),
            "once_kB": plain("once_bytes", ".4g", 1e3),
            "kernels_ms": cell(row, "kernels_s", ".2f", 1e-3),
            "step_ms": cell(row, "step_s", ".1f", 1e-3),
            "learning": learning,
            "code_error": cell(row, "code_error", ".3f"),
            "correlation": cell(row, "correlation", ".3f"),
            "shared": plain("share", ".1%"),
            "control": plain("control_share", ".1%"),
            "problem": row["error"] or "",
        }

    def explained(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """See `comparison.Table`."""
        limits = "; ".join(f"{task}: {GOALS[task].words}" for task in dict.fromkeys(row["task"] for row in rows))
        return [
            "means over seeds, deviations in brackets; seeds are paired: the same model and batches for every exchange",
            f"within: whether the mean quality is within {limits}; difference: from dense with the same seed",
            f"bytes and seconds are those of a step from step {self._runner.learnt} on, in which codes travel",
            *_COLUMNS,
        ]


_COLUMNS = (
    "coded_kB: payload that a rank hands over for the layers that codes cover, mean over ranks; least_kB: of the "
    "rank that has least; coded_wire_kB: what leaves a rank for them; fewer: how many times fewer than topk",
    "wire_kB: what leaves a rank for the whole model; once_kB: for the code, once in the run, in no other number",
    "kernels_ms: what rank 0 computes for the exchange: selection, encoder, decoder, sums; step_ms: a whole step",
    "learning: error of what is decoded as a share of its energy, in the first and the last tenth of the steps in "
    "which the code is learnt; code_error: afterwards; 1 is that of zeros",
    "correlation, shared: Pearson's, and mutual information's share of the entropy, of ranks' gradients; control: "
    "that share where nothing is shared",
)


def _row(task: str, name: str, runner: Runner) -> dict[str, Any]:
    """Summarise the results of an exchange over seeds."""
    finished = runner.finished
    done = [own for run, own in finished.items() if (run.task, run.arm, own.status) == (task, name, DONE)]
    values = [_values(own, finished.get(Training(task, DENSE, own.run.seed))) for own in done]
    goal, ratio = GOALS[task], RATIOS[task]
    row: dict[str, Any] = {
        "task": task,
        "exchange": name,
        "ratio": ratio if "ratio" in (done[0].outcome["compressor_config"] if done else {}) else None,
        "ranks": runner.ranks,
        "steps": done[0].outcome["steps"] if done else None,
        "seeds": len(done),
    }
    row |= comparison.over_seeds(_MEANS, values)
    dense = None if row["difference"] is None else row["quality"] - row["difference"]
    row["is_within"] = None if dense is None else goal.reaches(row["quality"], goal.target(dense))
    row["once_bytes"] = mean([own["once_bytes"] for own in values])
    row |= dict.fromkeys(("coded_numel", "coded_sent_bytes", "coded_least_bytes", "coded_wire_bytes"))
    if done:  # of the step after the one that may broadcast the code
        row |= coded_bytes(done[0].buckets, LGC(ratio=ratio), runner.ranks, runner.learnt + 1)
    return row


def _values(own: Finished, dense: Finished | None) -> dict[str, float | None]:
    """Return the results of a training, beside dense with the same seed where that is done."""
    known = dense if dense is not None and dense.status == DONE else None
    common = own.outcome["correlation"]["whole"] or {}
    return {
        "quality": finite(own.quality),
        "difference": None if known is None else finite(own.quality - known.quality),
        "once_bytes": None if known is None else float(own.outcome["once_bytes"] - known.outcome["once_bytes"]),
        "error_first": own.errors[0],
        "error_last": own.errors[1],
        **own.late,
        **{name: common.get(name) for name in ("correlation", "share", "control_share")},
    }


def _fewer(row: Mapping[str, Any], topk: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Return how many times fewer bytes of the coded layers than top-k's there are."""
    told: dict[str, float | None] = {}
    for name, base in (("sent", "sent"), ("least", "sent"), ("wire", "wire")):
        own, other = row[f"coded_{name}_bytes"], None if topk is None else topk[f"coded_{base}_bytes"]
        told[f"{name}_fewer"] = other / own if own and other is not None else None
    return told
