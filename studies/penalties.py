"""How far compressed training falls behind dense, and what foretells it: ``python studies/penalties.py``.

Ranks are simulated in this process, with the library's exchange among them, so that nothing but the exchange
differs between the runs of a task.
"""

import argparse
import functools
import itertools
import operator
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import in_process
import numpy as np
from in_process import SharedModel
from mpicomp.bench.measure import results
from mpicomp.bench.tasks import get_task
from numpy.typing import NDArray

import mpicomp
from mpicomp.cli import run_program
from mpicomp.cli.options import read_list
from mpicomp.collectives import bind
from mpicomp.compressors import Quantiser
from mpicomp.policies.convergence_penalty import ElementStatistics, ElementSurvey
from mpicomp.transport import LocalWorld

_STUDY = "penalties"
_RANKS = 4
_SPAN = (0.6, 0.9)  # shares of a run: the steps whose losses and gradients are compared
_OPTIMIZERS = {"task": "Adam", "sgd": "SGD", "muon": "Muon"}  # in pictures, which have room for eleven letters
_TINY = 1e-12  # least loss whose logarithm is taken
_EVERY = 5  # steps from one prediction to the next
_QUANTISERS = ("qsgd:8", "qsgd", "qsgd:3", "qsgd:2", "onebit", "onebit:2")  # that are surveyed; qsgd has four bits
_EXCHANGES = "topk:0.1,topk:0.03,topk:0.01,topk:0.003,qsgd,qsgd:3,onebit"
_KEY = ("task", "optimizer", "seed", "exchange", "steps")
_COLUMNS = {
    "task": "", "optimizer": "", "seed": "d", "exchange": "", "quality": ".4f", "behind": ".2f", "predicted": ".2f",
    "by_dense": ".2f", "delay": ".2f", "signal": ".3f",
}  # fmt: skip


def steps_behind(dense: NDArray[np.floating], late: NDArray[np.floating]) -> float:
    """Return the share of its steps by which the losses of ``late`` run after those of ``dense``, of the same batches.

    Their ratio is averaged over the steps that are compared, since batches differ more than steps do; a cubic through
    the logarithms of ``dense`` shows how many steps before the middle they were as much higher.
    """
    first, last = (int(share * len(dense)) for share in _SPAN)
    middle = (first + last) // 2
    dense, late = np.log(np.maximum(dense, _TINY)), np.log(np.maximum(late, _TINY))
    steps = np.arange(middle // 5, len(dense))
    curve = np.polynomial.Polynomial.fit(steps, dense[steps], 3)
    loss = curve(middle) + (late - dense)[first : last + 1].mean()
    before = np.arange(1, middle + 1)
    return float(middle - before[np.abs(np.maximum.accumulate(curve(before)[::-1])[::-1] - loss).argmin()]) / middle


def predict(elements: ElementStatistics, exchange: str, age: int) -> float | None:
    """Return the share of steps by which training would fall behind with an exchange; None where that is unknown."""
    compressor, collective = exchange_of(exchange)
    if not elements.known:
        return None
    if isinstance(compressor, Quantiser):
        return elements.quantiser_penalty(_QUANTISERS.index(exchange), _RANKS, age) if exchange in _QUANTISERS else None
    if not compressor.selects_by_ratio:
        return None
    may_drop_selected = collective != "auto" and bind(compressor, collective).may_drop_selected
    ratio = np.array([compressor.ratio])  # type: ignore[attr-defined]
    return float(elements.selection_penalties(ratio, _RANKS, age, compressor.by_magnitude)[may_drop_selected][0])


def exchange_of(words: str) -> tuple[mpicomp.Compressor, str]:
    """Return compressor and collective of ``NAME[:NUMBER[:COLLECTIVE]]``; the number is a ratio, or bits."""
    name, number, collective = [*words.split(":"), "", ""][:3]
    config: dict[str, Any] = {"id": name} | ({"rounding": "nearest"} if name == "qsgd" else {})
    if number:
        config |= {"bits": int(number)} if name in ("qsgd", "onebit") else {"ratio": float(number)}
    return mpicomp.get_compressor(config), collective or "auto"


def train(
    task_name: str, optimizer: str, seed: int, exchange: str, steps: int, exchanges: Sequence[str]
) -> dict[str, Any]:
    """Train a task with simulated ranks; return losses, and how far each exchange was predicted to be behind."""
    shared = SharedModel(get_task(task_name, seed), steps, optimizer)
    compressor, collective = exchange_of(exchange)
    world = LocalWorld(_RANKS)
    reducers = [mpicomp.Reducer(compressor, collective, policy={"warmup": 0}, comm=end) for end in world.transports]
    sizes = [parameter.numel() for parameter in shared.parameters.values()]
    quantisers = [cast(Quantiser, exchange_of(name)[0]) for name in _QUANTISERS]
    surveys = [ElementSurvey(sizes, quantisers) for _ in range(_RANKS)]
    elements = ElementStatistics(sum(sizes), len(quantisers), normalises=optimizer != "sgd")
    first, last = (int(share * steps) for share in _SPAN)
    losses, sent, lost, signals = [], 0.0, 0.0, []
    predicted: dict[str, list[float]] = {name: [] for name in exchanges}
    states: list[dict[str, Any]] = []
    for step in range(steps):
        gradients, loss_of_ranks = [], []
        for rank in range(_RANKS):
            loss_of_ranks.append(shared.backward(step, rank, _RANKS))
            gradients.append(shared.gradients())
        whole = [np.concatenate([grad.reshape(-1) for grad in arrays.values()]) for arrays in gradients]
        pairs = zip(surveys, whole, strict=True)
        elements.observe(np.array([survey.measure(array, None, sizes, step) for survey, array in pairs]))
        means = world.run([reducer.rounds(arrays) for reducer, arrays in zip(reducers, gradients, strict=True)])
        losses.append(float(np.mean(loss_of_ranks)))
        if first <= step <= last:
            record = reducers[0].last_step
            for bucket in record.buckets if record is not None else []:
                gain, energy = bucket.gain or 0.0, bucket.energy or 0.0
                sent, lost = sent + gain * energy, lost + (1 - gain) * energy
            signals.append(elements.signal)
            if exchange == "dense" and step % _EVERY == 0:
                states.append({"step": step, **elements.state_dict()})
            for name in exchanges if step % _EVERY == 0 else ():
                prediction = predict(elements, name, step)
                if prediction is not None:
                    predicted[name].append(prediction)
        shared.set_gradients(means[0])
        shared.updater.update()
    for reducer in reducers:
        reducer.close()
    return {
        "task": task_name, "optimizer": optimizer, "seed": seed, "exchange": exchange, "steps": steps,
        "quality": shared.quality(), "delay": lost / sent, "signal": float(np.mean(signals)),
        "predicted": {name: float(np.mean(values)) for name, values in predicted.items() if values},
        "losses": losses, "elements": states,
    }  # fmt: skip


def table(trainings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with how far each is behind the dense one of its task, seed and steps."""
    run = operator.itemgetter("task", "optimizer", "seed", "steps")
    dense = {run(row): row for row in trainings if row["exchange"] == "dense"}
    made = []
    for row in trainings:
        base = dense.get(run(row))
        if base is not None:
            penalty = 0.0 if base is row else steps_behind(np.array(base["losses"]), np.array(row["losses"]))
            of_row, of_dense = (each["predicted"].get(row["exchange"]) for each in (row, base))
            kept = {name: value for name, value in row.items() if name not in ("losses", "elements")}
            made.append(kept | {"behind": penalty, "predicted": of_row, "by_dense": of_dense})
    return made


def draw_losses(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the loss over dense against the bytes of an element, for each optimizer and family: a picture a task."""
    from matplotlib.figure import Figure

    dense = {(row["task"], row["optimizer"], row["seed"]): row["quality"] for row in rows if row["exchange"] == "dense"}
    for task in dict.fromkeys(row["task"] for row in rows):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        families: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["task"] == task and row["exchange"] != "dense":
                compressor, _ = exchange_of(row["exchange"])
                over = 100 * (row["quality"] / dense[task, row["optimizer"], row["seed"]] - 1)
                family = f"{compressor.id} {_OPTIMIZERS[row['optimizer']]}"
                families.setdefault(family, []).append((compressor.wire_bytes_per_element(4), over))
        for family, points in families.items():
            axes.plot(*np.array(sorted(points)).T, label=family)
        axes.set_xscale("log")
        axes.set_xlabel("bytes a parameter")
        axes.set_ylabel(f"{task}: loss over dense, %")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(path.with_stem(f"{path.stem}-{task}"), format="svg")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"studies/{_STUDY}.py",
        description="Show how far compressed training falls behind dense, and what may foretell it.",
    )
    parser.add_argument(
        "--exchange",
        default=_EXCHANGES,
        metavar="X[,..]",
        help="NAME, NAME:RATIO, NAME:BITS or NAME:RATIO:COLLECTIVE (%(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        choices=tuple(_OPTIMIZERS),
        default="task",
        help="the task's, SGD with momentum at the rate that suits digits, or Muon with AdamW (%(default)s)",
    )
    in_process.add_arguments(parser, "digits")
    parser.add_argument("--picture", metavar="F.svg", help="draw losses against bytes in F-TASK.svg, for each task")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Train what is not there yet, and print a table."""
    exchanges = ["dense", *read_list(arguments.exchange)]
    for exchange in exchanges:
        exchange_of(exchange)  # raises before hours of work
    tasks, seeds, there = in_process.read(_STUDY, arguments, _KEY, 20)
    for task, seed, exchange in itertools.product(tasks, seeds, exchanges):
        steps = arguments.steps or get_task(task).steps
        of_run = task, arguments.optimizer, seed, exchange, steps
        row = there.train(functools.partial(train, exchanges=exchanges), *of_run)
        if row is not None:
            print(f"{task}, seed {seed}, {exchange}: {row['quality']:.4f}", flush=True)
    results.show(table(there.made), _COLUMNS)
    if arguments.picture is not None:
        draw_losses(Path(arguments.picture), there.made)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
