"""What the constants of predicted seconds are worth, on a simulated network: ``python studies/dynamics.py``."""

import argparse
import functools
import itertools
import sys
from types import ModuleType
from typing import Any

import numpy as np
from constants import setting
from mpicomp.bench.measure import results

import mpicomp
from mpicomp.cli import run_program
from mpicomp.cli.options import read_list
from mpicomp.collectives import variants
from mpicomp.cost import network_model, plans
from mpicomp.cost.formulas import terms
from mpicomp.policies import plan_selector
from mpicomp.rounds import Group, Round
from mpicomp.transport import LocalWorld

_STUDY = "dynamics"
_RANKS, _NUMEL = 4, 50_000
_COMPUTING_S = 2e-3  # of a step
_LEARNING, _COMPARED, _AFTER = 60, 60, 40  # steps before those that are compared, these, and after a change
_FACTORS = {"allgatherv": 2.0, "bcast": 3.0, "allreduce": 1.5}  # times what formulas predict: it has to be learned
_NOISE = 0.5  # mean of what is added to a round, exponential, as a share of it
_SCALES = 0.25, 4.0
_CONSTANTS: dict[ModuleType, tuple[str, ...]] = {
    plans: (
        "ROUNDS_SD", "_AGEING_VARIANCE", "_MAX_SD", "_NOISE_VARIANCE", "_MIN_ROUNDS_FRACTION", "_CHANGED_SD",
        "_RECENT_PAIRS", "_MIN_PAIRS", "_MIN_PAIRS_OF_PLAN", "_MAX_SPREAD_RATIO", "_NORMAL_VARIATION",
    ),
    network_model: (
        "_LINK_SD", "_FACTOR_SD", "_LINK_DRIFT_VARIANCE", "_FACTOR_DRIFT_VARIANCE", "_LINK_MAX_VARIANCE", "_OUTLIER_SD",
        "MIN_CHANGE_LOG",
    ),
    plan_selector: (
        "SWITCH_MARGIN", "_UNTIMED_STEPS", "_MAX_SILENT_STEPS", "_LEARNING_INTERVAL_S", "_MEDIAN_STEPS",
        "_TOO_SLOW_RATIO",
    ),
}  # fmt: skip


class Links:
    """Seconds of rounds, as `LocalWorld` asks for them."""

    def __init__(self, bits: float, seed: int | None) -> None:
        self.bits = bits
        self._random = None if seed is None else np.random.default_rng(seed)

    def __call__(self, task: Round, group: Group) -> float:
        """Return the seconds of a round, noise included."""
        if group.size == 1:
            return 0.0
        cost = terms(task, group)
        seconds = (1e-4 * cost.latency + 8 / self.bits * cost.volume) * _FACTORS.get(task.operation, 1.0)
        return seconds * (1 + (0.0 if self._random is None else self._random.exponential(_NOISE)))


class Ranks:
    """Ranks that reduce long tails over links."""

    def __init__(self, links: Links, collective: str = "auto") -> None:
        self.links = links
        self._world = LocalWorld(_RANKS, hosts=_RANKS, network=links)
        self._reducers = [mpicomp.Reducer("dense", collective, comm=end) for end in self._world.transports]
        random = np.random.default_rng(0)
        self._pool = [random.laplace(size=(_RANKS, _NUMEL)).astype(np.float32) for _ in range(4)]
        self._turn = itertools.cycle(self._pool)

    def step(self) -> tuple[str, float]:
        ends = self._world.transports
        for end in ends:
            end.seconds += _COMPUTING_S
        before = max(end.clock() for end in ends)
        self._world.run(
            [reducer.rounds({"w": grad}) for reducer, grad in zip(self._reducers, next(self._turn), strict=True)]
        )
        record = self._reducers[0].last_step
        assert record is not None
        [bucket] = record.buckets
        return bucket.collective, max(end.clock() for end in ends) - before


@functools.cache
def fixed(bits: float) -> dict[str, float]:
    """Return the seconds of every plan that may be chosen, without noise."""
    found = {}
    for name in variants(mpicomp.Dense()):
        if "hierarchical" not in name:
            ranks = Ranks(Links(bits, None), name)
            ranks.step()
            found[name] = ranks.step()[1]
    return found


def judge(seeds: int, fast: float, slow: float) -> dict[str, float]:
    """Return how much slower the plans that run are than the best of all, and the steps to it after a change."""
    over, steps = [], []
    for seed in range(seeds):
        ranks = Ranks(Links(fast, seed))
        for _ in range(_LEARNING):
            ranks.step()
        best = _least(fast)
        over.append(np.mean([fixed(fast)[ranks.step()[0]] for _ in range(_COMPARED)]) / best - 1)
        ranks.links.bits = slow
        after = [fixed(slow)[ranks.step()[0]] <= 1.05 * _least(slow) for _ in range(_AFTER)]
        steps.append(after.index(True) if True in after else _AFTER)
    return {"over": float(np.mean(over)), "worst": float(np.max(over)), "steps": float(np.mean(steps))}


def _least(bits: float) -> float:
    return min(fixed(bits).values())


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"studies/{_STUDY}.py",
        description="Show, for constants of the cost model and of the choice with a quarter and four times their "
        "value, how much slower than the best the plans are that run, and after how many steps a change is followed.",
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="of the noise (%(default)s)")
    parser.add_argument("--bandwidths", default="4e9,2e8", metavar="B,B", help="before and after (%(default)s)")
    parser.set_defaults(alone=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print a row for each constant and value."""
    fast, slow = map(float, read_list(arguments.bandwidths))
    rows: list[dict[str, Any]] = [{"constant": "as they are", "times": ""} | judge(arguments.seeds, fast, slow)]
    for module, names in _CONSTANTS.items():
        for name, scale in itertools.product(names, _SCALES):
            value = getattr(module, name)
            other = max(1, round(scale * value)) if isinstance(value, int) else scale * value
            with setting(module, name, other):
                row = {"constant": f"{module.__name__.rpartition('.')[2]}.{name.strip('_')}", "times": f"{scale:g}"}
                rows.append(row | judge(arguments.seeds, fast, slow))
    results.show(rows, {"constant": "", "times": "", "over": ".1%", "worst": ".0%", "steps": ".1f"})
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
