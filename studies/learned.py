"""Learned codes compared with the exchanges that they replace, in one table: ``python studies/learned.py``."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import comparison
import numpy as np
from comparison import DENSE, Column, Comparison, Fields, Goal, Row, Training, finite, mean
from lab_jobs import DONE, Finished, read_json, read_lines

from mpicomp.cli import run_program
from mpicomp.collectives import bind
from mpicomp.compressors import get_compressor
from mpicomp.errors import ConfigurationError
from mpicomp.rounds import Group
from mpicomp.setting_checks import check_least
from mpicomp.systems.lgc import LGC

_STUDY = "learned"
_MINUTES = 240.0
_STEPS = 900  # of a training, unless others are named
PHASES = (LGC().dense_steps, LGC().training_steps)
"""Steps of the phases before codes travel, unless others are named."""
_LOOKS = 20  # comparisons of ranks' gradients in a training
_TOPK = "topk"  # others are said to have so many times fewer bytes than this

GOALS = {
    "digits": Goal(False, 1.0, -0.015, (0, 1, 2, 3, 4), "the held-out accuracy of dense less 0.015"),
    "text-lstm": Goal(True, 1.02, 0.0, (0, 1, 2), "1.02 times the held-out loss of dense"),
}
RATIOS = {"digits": 0.05, "text-lstm": 0.01}
"""Of digits, whose model has 38 thousand parameters, less than a twentieth is too few values for an autoencoder."""

EXCHANGES: Mapping[str, Mapping[str, Any]] = {
    DENSE: {"id": "dense"},
    "topk": {"id": "topk"},
    "star-topk": {"id": "topk"},
    "lgc-ring": {"id": "lgc"},
    "lgc-ring-selected": {"id": "lgc", "error": "selected"},
    "lgc-server": {"id": "lgc", "instance": "server"},
    "lgc-server-selected": {"id": "lgc", "instance": "server", "error": "selected"},
    "lgc-linear": {"id": "lgc", "code": "linear"},
}
"""Configurations by name, but for the ratio."""
# Pinned, so that no choice depends on the network, and nothing but codes is broadcast in the course of a run.
_COLLECTIVES = {"dense": "allreduce", "topk": "allgather", "star-topk": "star-topk"}

_MEANS = {
    "quality": "on all held-out data, after all steps",
    "difference": "from that of dense with the same seed",
    "sent_bytes": "of a step: payload of the whole model that rank 0 handed to the transport",
    "wire_bytes": "of a step: what left rank 0 for the whole model",
    "kernels_s": "of the median step: what rank 0 computed for the exchange",
    "step_s": "median step of rank 0",
    "error_first": "`code_error` in the first tenth of the steps in which the code was learned",
    "error_last": "in the last tenth of them",
    "code_error": "in the steps in which codes travelled, as far as rank 0 can tell",
    "correlation": "of ranks' gradients in this training",
    "share": "of their entropy that is mutual information",
    "control_share": "the same where nothing is shared",
}
_CODED: Fields = {
    "coded_numel": ("integer or null", "of the layers that a code covers"),
    "coded_sent_bytes": ("number or null", "of these layers in a step: payload of a rank, mean over ranks"),
    "coded_least_bytes": ("number or null", "of the rank that has least"),
    "coded_wire_bytes": ("number or null", "of these layers in a step: what leaves a rank, mean over ranks"),
}
ROW: Fields = {
    "task": ("string", "what was trained"),
    "exchange": ("string", "above"),
    "ratio": ("number or null", "kept fraction; null where there is none"),
    "ranks": ("integer", "of each training"),
    "steps": ("integer or null", "of each; null where none was done"),
    "seeds": ("integer", "whose trainings were done"),
    **comparison.means(_MEANS),
    "is_within": ("boolean or null", "whether the mean quality is within its limit; null where dense lacks a seed"),
    "once_bytes": ("number or null", "that left rank 0 once in the run, beyond those of dense: the code"),
    **_CODED,
    "sent_fewer": ("number or null", "`coded_sent_bytes` of `topk` over these"),
    "least_fewer": ("number or null", "`coded_sent_bytes` of `topk` over `coded_least_bytes`"),
    "wire_fewer": ("number or null", "`coded_wire_bytes` of `topk` over these"),
    "error": ("string or null", "the first error of its runs, or how many were cut"),
}
_OUTCOME: Fields = {
    "quality": ("number or null", "on all held-out data, after all steps; null where it is not done, as all below"),
    "late": ("object or null", "of the steps in which codes travel, above"),
    "error_first": ("number or null", "as in a row"),
    "error_last": ("number or null", "as in a row"),
    "once_bytes": ("integer or null", "that left rank 0 once in the run, first parameters among them"),
    "correlation": ("object or null", "as in the object of `train --json`"),
}
RUN: Fields = {
    "task": ("string", "what was trained"),
    "exchange": ("string", "above"),
    "seed": ("integer", "of the model, the batches and the schemes"),
    **comparison.RUN_FIELDS,
    **_OUTCOME,
}


def runs_of(exchanges: Sequence[str], seeds: Mapping[str, Sequence[int]]) -> list[Training]:
    """Return all trainings in their order: a seed after the other, so that all is known of some when time is over."""
    every = sorted({seed for of_task in seeds.values() for seed in of_task})
    return [Training(task, name, seed) for seed in every for task in seeds if seed in seeds[task] for name in exchanges]


def words_of(run: Training, steps: int, phases: tuple[int, int] = PHASES) -> list[str]:
    """Return the words after ``mpicomp`` for a training, but for the files that it writes."""
    config = dict(EXCHANGES[run.arm])
    if config["id"] != DENSE:
        config["ratio"] = RATIOS[run.task]
    if config["id"] == LGC.id:
        config["dense_steps"], config["training_steps"] = phases
    words = ["train", "--task", run.task, "--seed", str(run.seed), "--steps", str(steps), "--no-verdict"]
    words += ["--compressor", json.dumps(config), "--collective", _COLLECTIVES.get(run.arm, "learned")]
    return [*words, "--correlation", str(max(1, steps // _LOOKS))]


class Learned(Comparison):
    """A row for each task and exchange.

    The outcome of a training is the object of ``train --json``, and with it ``late``, of the steps in which codes
    travel as rank 0 has seen them; the code's error in the first and the last tenth of its learning;
    and the last step's ``buckets``.
    """

    columns: Mapping[str, Column] = {
        "exchange": ("exchange", ""),
        "quality": ("quality", ".4f"),
        "difference": ("difference", "+.4f"),
        "within": ("is_within", ""),
        "coded_kB": ("coded_sent_bytes", ".4g", 1e3),
        "fewer": ("sent_fewer", ".2f"),
        "least_kB": ("coded_least_bytes", ".4g", 1e3),
        "fewer_least": ("least_fewer", ".2f"),
        "coded_wire_kB": ("coded_wire_bytes", ".4g", 1e3),
        "fewer_wire": ("wire_fewer", ".2f"),
        "wire_kB": lambda row: "-" if row["wire_bytes"] is None else f"{row['wire_bytes'] / 1e3:.4g}",
        "once_kB": ("once_bytes", ".4g", 1e3),
        "kernels_ms": ("kernels_s", ".2f", 1e-3),
        "step_ms": ("step_s", ".1f", 1e-3),
        "learning": lambda row: (
            "-" if row["error_first"] is None else f"{row['error_first']:.3f} to {row['error_last']:.3f}"
        ),
        "code_error": ("code_error", ".3f"),
        "correlation": ("correlation", ".3f"),
        "shared": lambda row: "-" if row["share"] is None else f"{row['share']:.1%}",
        "control": lambda row: "-" if row["control_share"] is None else f"{row['control_share']:.1%}",
        "problem": lambda row: row["error"] or "",
    }

    def __init__(self, folder: Path, ranks: int, steps: int, phases: tuple[int, int] = PHASES) -> None:
        super().__init__(folder, ranks)
        self._steps, self._phases = steps, phases
        self.learnt = sum(phases)  # the step from which on codes travel, and bytes and seconds count

    def run(self, run: Training, left_s: float) -> Finished:
        words, files = words_of(run, self._steps, self._phases), {"--json": "json", "--metrics": "jsonl"}
        return self.run_job(run, words, files, {"ranks": self.ranks}, left_s)

    def read(self, run: Training) -> dict[str, Any] | None:
        outcome = read_json(self.folder.path(run.name, "json"))
        lines = read_lines(self.folder.path(run.name, "jsonl"))
        try:
            late = lines[self.learnt :]
            outcome["quality"] = float(outcome["quality"]["value"])
            outcome["buckets"] = lines[-1]["buckets"]
            outcome["late"] = {
                "wire_bytes": fmean(line["wire_bytes"] for line in late),
                "sent_bytes": fmean(line["sent_bytes"] for line in late),
                "kernels_s": median(line["phases_s"]["compress"] + line["phases_s"]["decode"] for line in late),
                "step_s": median(line["seconds"] for line in late),
                "code_error": fmean(errors) if (errors := _code_errors(late)) else None,
            }
            learning = _code_errors(lines[: self.learnt])
            tenth = max(1, len(learning) // 10)
            outcome["error_first"] = fmean(learning[:tenth]) if learning else None
            outcome["error_last"] = fmean(learning[-tenth:]) if learning else None
            return outcome if len(lines) == int(outcome["steps"]) else None
        except (ValueError, KeyError, TypeError, IndexError):
            return None

    def summary(self, finished: Finished) -> str:
        wire_bytes = finished.outcome["late"]["wire_bytes"]
        return f", quality {finished.outcome['quality']:.4f}, {wire_bytes:,.0f} bytes left rank 0 in a step"

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for task in dict.fromkeys(run.task for run in self.finished):
            names = dict.fromkeys(run.arm for run in self.finished if run.task == task)
            found = [self._row(task, name) for name in names]
            topk = next((row for row in found if row["exchange"] == _TOPK), {})
            for row in found:
                for name, base in (("sent", "sent"), ("least", "sent"), ("wire", "wire")):
                    nbytes, most = row[f"coded_{name}_bytes"], topk.get(f"coded_{base}_bytes")
                    row[f"{name}_fewer"] = most / nbytes if nbytes and most is not None else None
                row["error"] = comparison.problem(self._of(task, row["exchange"]))
            rows += found
        return rows

    def _of(self, task: str, name: str) -> list[Finished]:
        return [one for run, one in self.finished.items() if (run.task, run.arm) == (task, name)]

    def _row(self, task: str, name: str) -> dict[str, Any]:
        """Summarize the results of an exchange over seeds."""
        done = [one for one in self._of(task, name) if one.status == DONE]
        outcome, values = done[0].outcome if done else {}, [self._values(one) for one in done]
        row: dict[str, Any] = {
            "task": task,
            "exchange": name,
            "ratio": RATIOS[task] if "ratio" in outcome.get("compressor_config", {}) else None,
            "ranks": self.ranks,
            "steps": outcome.get("steps"),
            "seeds": len(done),
            **comparison.over_seeds(_MEANS, values),
        }
        dense = None if row["difference"] is None else row["quality"] - row["difference"]
        row["is_within"] = None if dense is None else GOALS[task].reaches(row["quality"], GOALS[task].target(dense))
        row["once_bytes"] = mean([of_seed["once_bytes"] for of_seed in values])
        row |= dict.fromkeys(_CODED)
        if done:  # of the step after the one that may broadcast the code
            row |= coded_bytes(outcome["buckets"], LGC(ratio=RATIOS[task]), self.ranks, self.learnt + 1)
        return row

    def _values(self, one: Finished) -> dict[str, float | None]:
        """Return the results of a training, and how they differ from dense with the same seed where that is done."""
        outcome, dense = one.outcome, self.finished.get(Training(one.run.task, DENSE, one.run.seed))
        known = dense.outcome if dense is not None and dense.status == DONE else None
        common = outcome["correlation"]["whole"] or {}
        return {
            "quality": finite(outcome["quality"]),
            "difference": None if known is None else finite(outcome["quality"] - known["quality"]),
            "once_bytes": None if known is None else float(outcome["once_bytes"] - known["once_bytes"]),
            **{name: outcome[name] for name in ("error_first", "error_last")},
            **outcome["late"],
            **{name: common.get(name) for name in ("correlation", "share", "control_share")},
        }

    def describe(self, finished: Finished) -> dict[str, Any]:
        run = finished.run
        found = {"task": run.task, "exchange": run.arm, "seed": run.seed, **comparison.ending(finished)}
        if finished.status != DONE:
            return found | dict.fromkeys(_OUTCOME)
        outcome = {name: finished.outcome[name] for name in _OUTCOME}
        return found | outcome | {"quality": finite(outcome["quality"])}

    def title(self, row: Row) -> str:
        task = row["task"]
        return f"{task}, {row['ranks']} ranks, ratio {RATIOS[task]}; {GOALS[task].better}"

    def notes(self, rows: Sequence[Row]) -> list[str]:
        limits = "; ".join(f"{task}: {GOALS[task].words}" for task in dict.fromkeys(row["task"] for row in rows))
        return [
            "means over seeds, deviations in brackets; seeds are paired: the same model and batches for every exchange",
            f"within: whether the mean quality is within {limits}; difference: from dense with the same seed",
            f"bytes and seconds are those of a step from step {self.learnt} on, in which codes travel",
            "coded_kB: payload that a rank hands over for the layers that codes cover, mean over ranks; least_kB: of "
            "the rank that has least; coded_wire_kB: what leaves a rank for them; fewer: how many times fewer than "
            "topk",
            "wire_kB: what leaves a rank for the whole model; once_kB: for the code, once in the run, in no other "
            "number",
            "kernels_ms: what rank 0 computes for the exchange: selection, encoder, decoder, sums; step_ms: a whole "
            "step",
            "learning: error of what is decoded as a share of its energy, in the first and the last tenth of the steps "
            "in which the code is learned; code_error: afterwards; 1 is that of zeros",
            "correlation, shared: Pearson's, and mutual information's share of the entropy, of ranks' gradients; "
            "control: that share where nothing is shared",
        ]


def _code_errors(lines: Sequence[Row]) -> list[float]:
    """Return the mean over buckets of each step in which one of them can tell it."""
    found = []
    for line in lines:
        known = [bucket["code_error"] for bucket in line["buckets"] if bucket["code_error"] is not None]
        found += [fmean(known)] if known else []
    return found


def coded_bytes(buckets: Sequence[Row], covered: LGC, ranks: int, step: int) -> dict[str, float]:
    """Return the bytes of the layers that a code covers, as if they were all there is, under any exchange.

    They are those of the rounds that collectives announce, which are those that they run. ``buckets`` are a step's, as
    ``train --metrics`` has them, ``covered`` says which layers these are, and ranks are in one group.
    """
    model = {layer["name"]: layer["numel"] for bucket in buckets for layer in bucket["layers"]}
    sent, wire, numel = np.zeros(ranks), np.zeros(ranks), 0
    for bucket in buckets:
        layers = _covered(covered, model, [(layer["name"], layer["numel"]) for layer in bucket["layers"]])
        if not layers:
            continue
        names, sizes = [name for name, _ in layers], [size for _, size in layers]
        scheme = bind(get_compressor(bucket["compressor"]).bind(names, sizes, model=model), bucket["collective"])
        numel += sum(sizes)
        for rank in range(ranks):
            group = Group(rank, ranks)
            for task in scheme.rounds(sum(sizes), np.dtype(np.float32), group, step):
                if not task.once:
                    sent[rank] += task.sent_bytes(group)
                    wire[rank] += task.wire_bytes(group)
    return dict(zip(_CODED, (numel, fmean(sent), float(sent.min()), fmean(wire)), strict=True))


def _covered(covered: LGC, model: Mapping[str, int], layers: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return those parameters of a bucket whose selected values travel in a code."""
    names, sizes = [name for name, _ in layers], [size for _, size in layers]
    parts = covered.bind(names, sizes, model=model).selected(sum(sizes)).parts
    found, start = [], 0
    for name, size in layers:
        if any(part.travels == "coded" and part.start <= start < part.stop for part in parts):
            found.append((name, size))
        start += size
    return found


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="studies/learned.py",
        description="Train with dense exchange, top-k and every form of LGC, and show for every task their quality, "
        "bytes and seconds, the error of the code, and how much ranks' gradients have in common: mean and deviation "
        "over seeds. Without options it takes hours.",
    )
    parser.add_argument(
        "--exchanges",
        metavar="E[,..]",
        help="dense, which is run in any case, topk, star-topk, lgc-ring, lgc-ring-selected, lgc-server, "
        "lgc-server-selected, lgc-linear (all)",
    )
    parser.add_argument(
        "--ranks", type=int, default=4, metavar="N", help="of each training, on this host (%(default)s)"
    )
    parser.add_argument("--phases", metavar="D,L", help="dense steps, and steps in which codes are learned (50,150)")
    comparison.add_arguments(parser, _MINUTES, str(_STEPS))
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the trainings one after the other, and print a table for each task; 1 where one failed."""
    exchanges = comparison.read_arms(_STUDY, "--exchanges", arguments.exchanges, list(EXCHANGES))
    seeds_of = comparison.read_seeds(_STUDY, arguments.tasks, arguments.seeds, GOALS)
    ranks = check_least(_STUDY, "--ranks", arguments.ranks, 2)
    comparison.check(_STUDY, arguments)
    steps = _STEPS if arguments.steps is None else arguments.steps
    phases = _phases(arguments.phases)
    if steps <= sum(phases):
        raise ConfigurationError(
            f"{_STUDY}: --steps must be more than {sum(phases)}, before which no code travels, got {steps}"
        )
    comparison.check_tasks(_STUDY)
    runs = runs_of(exchanges, seeds_of)
    with comparison.folder_of(arguments) as folder:
        first_line, minutes = f"{_STUDY}: {len(runs)} runs, {ranks} ranks, {steps} steps", arguments.limit or _MINUTES
        study = Learned(folder, ranks, steps, phases)
        return comparison.run_all(study, first_line, iter([runs]), minutes, arguments.json)


def _phases(text: str | None) -> tuple[int, int]:
    """Read the lengths of the phases before codes travel."""
    if text is None:
        return PHASES
    try:
        dense, learning = (int(word) for word in text.split(","))
    except ValueError:
        raise ConfigurationError(f"{_STUDY}: --phases must be two whole numbers such as 50,150, got {text!r}") from None
    return check_least(_STUDY, "--phases", dense, 0), check_least(_STUDY, "--phases", learning)


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
