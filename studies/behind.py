"""How far compressed training falls behind dense, and what foretells it: ``python studies/behind.py``.

Ranks are simulated in this process, with the library's own exchange among them, so that nothing but the exchange
differs between the runs of a task.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpicomp.bench.measure import results
from mpicomp.bench.tasks import get_task, list_tasks
from mpicomp.bench.tasks.updating import Updater
from numpy.typing import NDArray

import mpicomp
from mpicomp.cli import run_program
from mpicomp.cli.options import check_least, check_writable, read_list
from mpicomp.transport import LocalWorld

_STUDY = "behind"
_RANKS = 4
_SPAN = (0.6, 0.9)  # shares of a run: the steps whose losses are compared, and whose gradients are looked at
_SAMPLED = 1 << 16  # elements whose gradients are followed one by one
_MEMORY = 0.03  # share of a step in their running means
_CLASSES = 40  # classes of elements by scale, two for each power of two
_EXCHANGES = "topk:0.1,topk:0.03,topk:0.01,topk:0.003,qsgd,onebit"
_KEY = ("task", "seed", "exchange", "steps")
_COLUMNS = {
    "task": "", "seed": "d", "exchange": "", "quality": ".4f", "behind": ".2f", "by_delay": ".2f", "by_waits": ".2f",
    "delay": ".2f", "signal": ".3f",
}  # fmt: skip


def steps_behind(dense: NDArray[np.floating], late: NDArray[np.floating]) -> float:
    """Return the share of its steps by which the losses of ``late`` run after those of ``dense``.

    Parameters
    ----------
    dense, late : arrays, shape (steps,)
        Losses of training, of the same batches. Their ratio is averaged over the steps that are compared, since batches
        differ more than steps do; a cubic through the logarithms of ``dense`` says how many steps before the middle
        they were as much higher.
    """
    first, last = (int(share * len(dense)) for share in _SPAN)
    middle = (first + last) // 2
    dense, late = np.log(dense), np.log(late)
    steps = np.arange(middle // 5, len(dense))
    curve = np.polynomial.Polynomial.fit(steps, dense[steps], 3)
    loss = curve(middle) + (late - dense)[first : last + 1].mean()
    before = np.arange(1, middle + 1)
    return float(middle - before[np.abs(np.maximum.accumulate(curve(before)[::-1])[::-1] - loss).argmin()]) / middle


def by_delay(delay: float, signal: float) -> float:
    """Return the share of steps that is lost if every element waits for ``delay`` steps, in the mean over energy.

    What waits adds up, noise by its energy and signal by its amplitude. So the energy of what is delivered grows by the
    factor ``1 + signal delay``, and the steps of Adam, which divides by its root, shrink by that.
    """
    return 1 - 1 / math.sqrt(1 + signal * delay)


def by_waits(scales: NDArray[np.floating], signals: NDArray[np.floating], ratio: float) -> float:
    """Return the share of steps that is lost if each element waits until it reaches the threshold of top-k.

    Parameters
    ----------
    scales, signals : arrays, shape (elements,)
        Root mean square of each element's gradients over steps, and the share of signal in their energy.
    ratio : float
        Kept fraction, in (0, 1].

    Notes
    -----
    Noise of a scale s comes to a threshold h after ``(h / s)**2`` steps, signal after ``h / s``; their rates add. The
    threshold is the one at which the rates of all elements add up to k. An element that waits for t steps has a second
    moment that is ``1 + (t - 1) signal`` times larger. Under Adam it contributes its signal times its scale to what a
    step achieves, over the root of that.
    """
    noise, drift = scales**2 * (1 - signals), scales * np.sqrt(signals)

    def rates(threshold: float) -> NDArray[np.floating]:
        found: NDArray[np.floating] = np.minimum(1.0, noise / threshold**2 + drift / threshold)
        return found

    low, high = 0.0, 1e6 * float(scales.max())
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if rates(middle).mean() > ratio else (low, middle)
    waits = 1 / np.maximum(rates(high), 1e-12)
    weights = scales * signals
    return 1 - float((weights / np.sqrt(1 + (waits - 1) * signals)).sum() / weights.sum())


class Elements:
    """Running means of some elements' gradients on one rank: their squares, and products with those of the step before.

    Parameters
    ----------
    numel : int
        Of all elements, of which some are followed.
    """

    def __init__(self, numel: int) -> None:
        self._stride = max(1, numel // _SAMPLED)
        self._before: NDArray[np.float64] | None = None
        self._squares = self._products = np.zeros(-(-numel // self._stride))

    def see(self, gradient: NDArray[np.floating]) -> None:
        """Learn from the gradient of a step."""
        now = gradient[:: self._stride].astype(np.float64)
        if self._before is not None:
            self._squares = self._squares + _MEMORY * (now * now - self._squares)
            self._products = self._products + _MEMORY * (now * self._before - self._products)
        self._before = now

    @property
    def signal(self) -> float:
        """Share of signal in the energy of gradients."""
        return float(np.clip(self._products.sum() / self._squares.sum(), 1e-4, 1))

    def scales_and_signals(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the scale of each element that is ever changed, and the share of signal of all that are as large."""
        scales = np.sqrt(self._squares)
        there = scales > 0
        scales, products = scales[there], self._products[there]
        place = np.clip(np.floor(2 * np.log2(scales / scales.max())) + _CLASSES, 0, _CLASSES).astype(int)
        energy = np.bincount(place, scales**2, _CLASSES + 1)
        shares = np.bincount(place, products, _CLASSES + 1) / np.where(energy > 0, energy, 1)
        return scales, np.clip(shares, 0, 1)[place]


def exchange_of(words: str) -> tuple[mpicomp.Compressor, str]:
    """Return the compressor and the collective that ``NAME``, ``NAME:RATIO`` or ``NAME:RATIO:COLLECTIVE`` stand for."""
    name, ratio, collective = [*words.split(":"), "", ""][:3]
    config = {"id": name} | ({"ratio": float(ratio)} if ratio else {})
    compressor = mpicomp.get_compressor(config | ({"rounding": "nearest"} if name == "qsgd" else {}))
    return compressor, collective or "auto"


def train(task_name: str, seed: int, exchange: str, steps: int) -> dict[str, Any]:
    """Train a task with simulated ranks.

    Returns
    -------
    dict
        Losses of all steps, the quality in the end, and what may foretell how far it is behind.
    """
    task = get_task(task_name, seed)
    model = task.model()
    parameters = dict(model.named_parameters())
    updater = Updater(task, task.optimizer(model), steps)
    compressor, collective = exchange_of(exchange)
    world = LocalWorld(_RANKS)
    reducers = [mpicomp.Reducer(compressor, collective, comm=end) for end in world.transports]
    elements = Elements(sum(parameter.numel() for parameter in parameters.values()))
    first, last = (int(share * steps) for share in _SPAN)
    losses, sent, lost, signals, waits = [], 0.0, 0.0, [], []
    for step in range(steps):
        gradients, loss_of_ranks = [], []
        for rank in range(_RANKS):
            model.zero_grad()
            loss = task.loss(model, task.batch(step, rank, _RANKS))
            loss.backward()  # type: ignore[no-untyped-call]
            loss_of_ranks.append(float(loss.detach()))
            own = ((name, parameter.grad) for name, parameter in parameters.items())
            gradients.append({name: grad.numpy().copy() for name, grad in own if grad is not None})
        elements.see(np.concatenate([grad.reshape(-1) for grad in gradients[0].values()]))
        means = world.run([reducer.rounds(own) for reducer, own in zip(reducers, gradients, strict=True)])
        losses.append(float(np.mean(loss_of_ranks)))
        if first <= step <= last:
            record = reducers[0].last_step
            for bucket in record.buckets if record is not None else []:
                gain, energy = bucket.gain or 0.0, bucket.energy or 0.0
                sent, lost = sent + gain * energy, lost + (1 - gain) * energy
            signals.append(elements.signal)
            if (ratio := getattr(compressor, "ratio", None)) is not None and step % 10 == 0:
                waits.append(by_waits(*elements.scales_and_signals(), ratio))
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                parameter.grad.numpy()[...] = means[0][name]
        updater.update()
    for reducer in reducers:
        reducer.close()
    delay, signal = lost / sent, float(np.mean(signals))
    return {
        "task": task_name, "seed": seed, "exchange": exchange, "steps": steps, "quality": task.evaluate(model),
        "delay": delay, "signal": signal, "by_delay": by_delay(delay, signal),
        "by_waits": float(np.mean(waits)) if waits else None, "losses": losses,
    }  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with how far each is behind the dense one of its task, seed and steps."""
    dense = {(row["task"], row["seed"], row["steps"]): row for row in rows if row["exchange"] == "dense"}
    made = []
    for row in rows:
        base = dense.get((row["task"], row["seed"], row["steps"]))
        if base is not None:
            behind = 0.0 if base is row else steps_behind(np.array(base["losses"]), np.array(row["losses"]))
            made.append({name: own for name, own in row.items() if name != "losses"} | {"behind": behind})
    return made


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog=f"studies/{_STUDY}.py",
        description="Show how far compressed training falls behind dense, beside what may foretell it.",
    )
    parser.add_argument("--task", default="digits", metavar="T[,..]", help=f"{', '.join(list_tasks())} (%(default)s)")
    parser.add_argument("--seeds", default="0", metavar="K[,..]", help="(%(default)s)")
    parser.add_argument(
        "--exchange",
        default=_EXCHANGES,
        metavar="X[,..]",
        help="NAME, NAME:RATIO or NAME:RATIO:COLLECTIVE (%(default)s)",
    )
    parser.add_argument("--steps", type=int, metavar="S", help="of a training (those of the task)")
    parser.add_argument(
        "--rows", metavar="F.jsonl", help="append each training's row to F; what is there is not run again"
    )
    parser.set_defaults(alone=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Train what is not there yet, and print a table."""
    if arguments.steps is not None:
        check_least(_STUDY, "--steps", arguments.steps, 20)
    tasks, exchanges = read_list(arguments.task), ["dense", *read_list(arguments.exchange)]
    seeds = [int(word) for word in read_list(arguments.seeds)]
    for exchange in exchanges:
        exchange_of(exchange)  # says what is wrong before hours of work
    path = None if arguments.rows is None else Path(arguments.rows)
    if path is not None:
        check_writable(_STUDY, str(path))
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path is not None and path.exists() else []
    for task, seed in itertools.product(tasks, seeds):
        steps = arguments.steps or get_task(task).steps
        for exchange in exchanges:
            if any(
                (row["task"], row["seed"], row["exchange"], row["steps"]) == (task, seed, exchange, steps)
                for row in rows
            ):
                continue
            rows.append(train(task, seed, exchange, steps))
            if path is not None:
                with path.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            print(f"{task}, seed {seed}, {exchange}: {rows[-1]['quality']:.4f}", flush=True)
    results.show(table(rows), _COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
