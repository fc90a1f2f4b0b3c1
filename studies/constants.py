"""What the constants of the joint choice are worth: ``python studies/constants.py --rows rows.jsonl``.

Nothing is trained: predictions are made again, with other constants, from the rows of ``studies/penalties.py``, and the
plans that would be chosen by them are judged by how far training was behind.
"""

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from mpicomp.bench.lab.lab_settings import parse_bandwidth, parse_latency
from mpicomp.bench.measure import results
from mpicomp.bench.tasks import get_task
from penalties import exchange_of, predict, steps_behind

from mpicomp.cli import run_program
from mpicomp.cli.options import read_list
from mpicomp.collectives import bind, variants
from mpicomp.compressors import Quantiser
from mpicomp.cost import Network, sample_views
from mpicomp.policies import convergence_penalty, plan_tradeoff
from mpicomp.policies.convergence_penalty import ElementStatistics
from mpicomp.policies.plan_tradeoff import PlanTradeoff
from mpicomp.policies.ratio_levels import suggested_compressors
from mpicomp.rounds import WORLD, Group

_STUDY = "constants"
_RANKS = 4
_NETWORKS = "50mbit/1ms,200mbit/1ms,1gbit/0us,2.5gbit/0us"
_COMPUTE_S = {"digits": 0.005, "text-lstm": 0.13, "text-gpt": 0.28}  # of a step without exchange, on such a machine
_FIDELITY = 0.7
_FITTED = {
    "factor": (convergence_penalty, "_LOSS_FACTOR", (1.0, 1.25, 1.5, 2.0, 3.0)),
}
"""Of each constant that is fitted: where it is, and the values among which it is chosen with a task left out."""
_SET = {
    "caution": (plan_tradeoff, "_CAUTION", (1.0, 1.5, 2.0, 3.0)),
    "pays": (plan_tradeoff, "MIN_GAIN", (0.0, 0.05, 0.1, 0.2)),
    "harmless": (plan_tradeoff, "_MIN_HARMLESS_GAIN", (0.0, 0.03, 0.05, 0.1)),
    "more": (plan_tradeoff, "_BUCKET_PENALTY_RATIO", (1.0, 2.0, 4.0)),
}
_FIDELITIES = (0.5, 0.6, 0.7, 0.8, 0.9)
_PARTS = (50, 100, 200, 400, 800)
_PROBLEMS, _BUCKETS, _ROWS = 200, 8, 40

Row = Mapping[str, Any]


class Trained:
    """A task's trainings with one seed: how far each exchange was behind, and what was known in the dense one."""

    def __init__(self, rows: Sequence[Row]) -> None:
        [dense] = [row for row in rows if row["exchange"] == "dense"]  # another one may have `behind` for `losses`
        self.task = str(dense["task"])
        losses = np.array(dense["losses"])
        self.steps_behind = {
            row["exchange"]: row["behind"] if "behind" in row else steps_behind(losses, np.array(row["losses"]))
            for row in rows
            if row is not dense
        }
        self._observed: list[tuple[int, ElementStatistics]] = []
        for state in dense["elements"]:
            elements = ElementStatistics(1, (len(state["sums"]) - convergence_penalty.ROWS) // 2)
            elements.load_state_dict(state)
            self._observed.append((state["step"], elements))
        self.predicted()
        self.numel = sum(parameter.numel() for parameter in get_task(self.task).model().parameters())

    def predicted(self) -> dict[str, float]:
        """Return what is predicted of each exchange, with the constants as they are now."""
        predictions: dict[str, float] = {}
        for exchange in self.steps_behind:
            compressor, _ = exchange_of(exchange)
            if isinstance(compressor, Quantiser) and compressor not in suggested_compressors(None)[1]:
                continue  # no candidate of `auto`
            found = [predict(elements, exchange, step) for step, elements in self._observed]
            known = [value for value in found if value is not None]
            if known:
                predictions[exchange] = float(np.mean(known))
        return predictions

    def errors(self) -> list[float]:
        return [abs(value - self.steps_behind[exchange]) for exchange, value in self.predicted().items()]

    def regret(self, network: Network, fidelity: float) -> tuple[float, float]:
        """Return how much longer training takes by the predicted exchange than by the best, and how far it lags."""
        predictions = self.predicted()
        names = ["dense", *predictions]
        seconds = np.array([seconds_of(name, self.numel, network) for name in names])
        guess = np.array([0.0, *predictions.values()])
        truth = np.array([0.0, *(max(0.0, self.steps_behind[name]) for name in predictions)])
        tradeoff = PlanTradeoff([guess], [seconds], [1.0], [0.0], _COMPUTE_S[self.task], 1 - fidelity)
        selects = np.array([False, *(exchange_of(name)[0].selects_by_ratio for name in predictions)])
        [row] = tradeoff.best_over([0], [selects])
        seconds_to_quality = [tradeoff.seconds_of_step([other]) / (1 - truth[other]) for other in range(len(names))]
        return seconds_to_quality[row] / min(seconds_to_quality) - 1, float(truth[row])


def seconds_of(exchange: str, numel: int, network: Network) -> float:
    """Return the seconds of an exchange's rounds on a network, by the collective that takes least."""
    compressor, collective = exchange_of(exchange)
    group = Group(0, _RANKS)
    views = sample_views(group)
    names = [name for name in variants(compressor) if "hierarchical" not in name]
    schemes = [bind(compressor, name) for name in ([collective] if collective != "auto" else names)]
    schemes = [scheme for scheme in schemes if not scheme.may_drop_selected] or schemes
    rounds = [[scheme.rounds(numel, np.dtype(np.float32), view) for view in views] for scheme in schemes]
    return min(network.seconds(network.coefficients(of_views, views)) for of_views in rounds)


def network_of(words: str) -> Network:
    """Return a network of these links."""
    bandwidth, latency = words.split("/")
    network = Network(_RANKS)
    network.set_link(WORLD, max(1e-9 * parse_latency(latency), 5e-5), 8 / parse_bandwidth(bandwidth), 0.1)
    return network


@contextlib.contextmanager
def setting(module: ModuleType, name: str, value: float) -> Iterator[None]:
    """Set a constant to another value for the block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def left_out(trained: Sequence[Trained]) -> list[dict[str, Any]]:
    """Return a row for each task: the fitted constants that are best on the others, and how far off it is with them."""
    tasks = list(dict.fromkeys(training.task for training in trained))
    errors: dict[tuple[float, ...], dict[str, float]] = {}
    for values in itertools.product(*(values for *_, values in _FITTED.values())):
        with contextlib.ExitStack() as stack:
            for (module, name, _), value in zip(_FITTED.values(), values, strict=True):
                stack.enter_context(setting(module, name, value))
            errors[values] = {task: _error(trained, task) for task in tasks}
    now = tuple(float(getattr(module, name)) for module, name, _ in _FITTED.values())
    made = []
    for task in tasks:
        others = {values: np.mean([of[name] for name in tasks if name != task]) for values, of in errors.items()}
        best = min(others, key=lambda values: float(others[values]))
        row: dict[str, Any] = {"left out": task} | dict(zip(_FITTED, best, strict=True))
        made.append(row | {"error": errors[best][task], "as they are": errors[now][task]})
    return made


def _error(trained: Sequence[Trained], task: str) -> float:
    return float(np.mean([error for one in trained if one.task == task for error in one.errors()]))


def sensitivities(trained: Sequence[Trained], networks: Sequence[Network]) -> list[dict[str, Any]]:
    """Return a row for each constant and value: mean error of predictions, and regret of the choice on the networks."""
    made = []
    for label, (module, name, values) in (_FITTED | _SET).items():
        for value in values:
            with setting(module, name, value):
                made.append({"constant": label, "value": value} | _judged(trained, networks, _FIDELITY))
    made += [{"constant": "fidelity", "value": value} | _judged(trained, networks, value) for value in _FIDELITIES]
    return made


def _judged(trained: Sequence[Trained], networks: Sequence[Network], fidelity: float) -> dict[str, float]:
    found = np.array([one.regret(network, fidelity) for one in trained for network in networks])
    errors = [error for one in trained for error in one.errors()]
    return {
        "error": float(np.mean(errors)), "regret": float(found[:, 0].mean()), "worst": float(found[:, 0].max()),
        "behind": float(found[:, 1].mean()),
    }  # fmt: skip


def parts() -> list[dict[str, Any]]:
    """Return a row for each number of parts: how far the program's choice is from that with many times as many."""
    problems = [_problem(seed) for seed in range(_PROBLEMS)]

    def worths(count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        with setting(plan_tradeoff, "_PENALTY_BINS", count):
            return np.array([problem.cost(problem.best()) for problem in problems])

    least = worths(20_000)
    found = {count: worths(count) / least - 1 for count in _PARTS}
    return [{"parts": count, "mean": float(over.mean()), "worst": float(over.max())} for count, over in found.items()]


def _problem(seed: int) -> PlanTradeoff:
    random = np.random.default_rng(seed)
    behind_of = [np.concatenate((np.sort(random.exponential(0.2, _ROWS)), [0.0])) for _ in range(_BUCKETS)]
    seconds = [np.concatenate((-np.sort(-random.exponential(0.05, _ROWS)), [0.3])) for _ in range(_BUCKETS)]
    ready = np.linspace(-0.2, 0.0, _BUCKETS).tolist()
    return PlanTradeoff(behind_of, seconds, random.dirichlet(np.ones(_BUCKETS)).tolist(), ready, 0.3, 1 - _FIDELITY)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"studies/{_STUDY}.py",
        description="Show what other values of the constants of the joint choice would have come to.",
    )
    parser.add_argument("--rows", required=True, metavar="F.jsonl[,..]", help="that studies/penalties.py has written")
    parser.add_argument("--networks", default=_NETWORKS, metavar="B/L[,..]", help="(%(default)s)")
    parser.set_defaults(alone=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print a table of the tasks left out, one of the constants, and one of the parts."""
    by_training: dict[Any, list[Row]] = {}
    for name in read_list(arguments.rows):
        for row in map(json.loads, Path(name).read_text().splitlines()):
            if row["optimizer"] == "task":  # constants are fitted to optimizers that normalise
                by_training.setdefault((row["task"], row["seed"], row["steps"]), []).append(row)
    trained = list(map(Trained, by_training.values()))
    networks = [network_of(words) for words in read_list(arguments.networks)]
    results.show(
        left_out(trained), {"left out": "", **dict.fromkeys(_FITTED, "g"), "error": ".2f", "as they are": ".2f"}
    )
    print()
    columns = {"constant": "", "value": "g", "error": ".2f", "regret": ".1%", "worst": ".0%", "behind": ".2f"}
    results.show(sensitivities(trained, networks), columns)
    print()
    results.show(parts(), {"parts": "d", "mean": ".2%", "worst": ".1%"})
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
