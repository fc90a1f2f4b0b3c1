"""``auto`` against the best fixed plan in hindsight, on emulated networks: ``python studies/hindsight.py``."""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import comparison
import lab_jobs
import numpy as np
from comparison import Column, Comparison, Fields, Row, mean
from lab_jobs import DONE, Finished, Network
from policies import LINK_FIELDS
from policy_runs import DENSE, GOALS, NETWORK_AWARE, NETWORKS, PLANS, Run, Timing, Training
from scipy import stats

from mpicomp.cli import run_program
from mpicomp.setting_checks import check_least

_STUDY = "hindsight"
_MINUTES = 300.0  # limit of the whole study
_TASKS = "digits,digits-shards,text-lstm,text-gpt"
_CHOOSE, _TEST = "0,1,2", "3,4,5"
_MANY = {"digits": 10, "digits-shards": 10}  # seeds that are tested of tasks whose trainings are short
_AUTO = "auto"
WHOLE = (DENSE, "dense-bf16")
"""Plans that send every element whole; the faster one of them is what auto has to be as fast as."""
_NEAR = 1.1  # how much longer than the best on some network a plan may take with the first seed, to be tried with more


def _interval(name: str, meaning: str) -> Fields:
    return {name: ("number or null", meaning)} | {f"{name}_{end}": ("number or null", "") for end in ("low", "high")}


ROW: Fields = {
    **LINK_FIELDS,
    "seeds": ("integer", "that are tested"),
    "plan": ("string or null", "the best fixed plan; null where no plan reached the target with all seeds that choose"),
    "dense": ("string", "the faster one of dense in 32 and in 16 bits"),
    "auto_s": ("number or null", "mean time to quality"),
    "plan_s": ("number or null", "of the best plan"),
    "dense_s": ("number or null", "of `dense`"),
    **_interval("of_plan", "time of `auto` over that of the best plan, geometric mean"),
    **_interval("of_dense", "the same over that of `dense`"),
    **_interval("quality", "of `auto` less that of dense in 32 bits; of a loss as a share"),
    "reached": ("integer", "seeds with which `auto` reached the target"),
    "error": ("string or null", "the first error of its runs, or how many were cut"),
}


def interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Return the mean of values and the ends of its 95 % interval, by Student's t; None for fewer than two.

    Examples
    --------
    >>> [round(end, 3) for end in interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    if len(values) < 2:
        return None
    middle = float(np.mean(values))
    half = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return middle, middle - half, middle + half


def ratio_interval(upper: Sequence[float | None], lower: Sequence[float | None]) -> tuple[float, float, float] | None:
    """Return the geometric mean of ratios of pairs and its interval; None where a pair is not whole."""
    pairs = list(zip(upper, lower, strict=True))
    if any(one is None or other is None for one, other in pairs):
        return None
    found = interval([math.log(one / other) for one, other in pairs if one is not None and other is not None])
    return None if found is None else (math.exp(found[0]), math.exp(found[1]), math.exp(found[2]))


class Hindsight(Comparison):
    """A row for each task and network; by task, the plan is chosen on the seeds ``choose`` and compared on ``test``."""

    columns: Mapping[str, Column] = {
        "network": lambda row: f"{row['bandwidth']}/{row['latency']}",
        "auto_s": ("auto_s", ".2f"),
        "best_s": ("plan_s", ".2f"),
        "dense_s": ("dense_s", ".2f"),
        "of_best": ("of_plan", ".2f"),
        "of_dense": ("of_dense", ".2f"),
        "quality": lambda row: comparison.cell(row, "quality", "+.2%" if GOALS[row["task"]].lower else "+.4f"),
        "reached": lambda row: f"{row['reached']}/{row['seeds']}",
        "best": lambda row: f"{row['plan'] or '-'}; {row['dense']}" + (f" ({row['error']})" if row["error"] else ""),
    }

    def __init__(
        self, folder: Path, hosts: int, networks: Sequence[Network], steps: int | None,
        choose: Mapping[str, list[int]], test: Mapping[str, list[int]],
    ) -> None:  # fmt: skip
        super().__init__(folder, hosts, networks, steps)
        self.choose, self.test = choose, test

    def stages(self, task: str, plans: Sequence[str]) -> Iterator[list[Run]]:
        """Yield what is run of a task, each stage by what those before it came to."""
        first, *others = self.choose[task]
        yield [Training(task, plan, first) for plan in plans]
        reached = tuple(plan for plan in plans if plan == DENSE or self._reaches(task, plan, first))
        yield [Timing(task, reached, first, network) for network in self.networks]
        near = [plan for plan in plans if plan == DENSE or self._is_near(task, plan)]
        yield [Training(task, plan, seed) for seed in others for plan in near]
        chosen = {network: self._chosen(task, network) for network in self.networks}
        fixed = dict.fromkeys([*WHOLE, *(plan for plan in chosen.values() if plan is not None)])
        for seed in self.test[task]:
            stage: list[Run] = [Training(task, plan, seed) for plan in fixed]
            for network, plan in chosen.items():
                stage.append(Training(task, _AUTO, seed, network))
                if seed == self.test[task][0]:
                    arms = dict.fromkeys([*WHOLE, *([] if plan is None else [plan]), _AUTO])
                    stage.append(Timing(task, tuple(arms), seed, network))
            yield stage

    def _reaches(self, task: str, plan: str, seed: int) -> bool:
        found = self._result(task, self.networks[0], plan, seed, seed)
        return found is not None and found["steps_to_quality"] is not None

    def _is_near(self, task: str, plan: str) -> bool:
        """Return whether a plan was near the best one on some network with the first seed."""
        seed = self.choose[task][:1]
        for network in self.networks:
            times = {other: self._seconds(task, network, other, seed, seed[0])[0] for other in PLANS}
            plan_s, known = times[plan], [value for value in times.values() if value is not None]
            if plan_s is not None and plan_s <= _NEAR * min(known):
                return True
        return False

    def _chosen(self, task: str, network: Network) -> str | None:
        """Return the fixed plan that comes soonest to quality on a network, of those of equal quality in the end."""
        seeds = self.choose[task]
        times = {plan: mean(self._seconds(task, network, plan, seeds, seeds[0])) for plan in PLANS}
        known = {plan: time for plan, time in times.items() if time is not None and self._is_equal(task, plan, seeds)}
        return min(known, key=lambda plan: known[plan]) if known else None

    def rows(self) -> list[dict[str, Any]]:
        return [self._row(task, network) for task in self.choose for network in self.networks]

    def _row(self, task: str, network: Network) -> dict[str, Any]:
        seeds, first = self.test[task], self.test[task][0]
        plan = self._chosen(task, network)
        times = {arm: self._seconds(task, network, arm, seeds, first) for arm in (*WHOLE, _AUTO, plan or DENSE)}
        known = {arm: time for arm in WHOLE if (time := mean(times[arm])) is not None}
        dense = min(known, key=lambda arm: known[arm]) if known else DENSE
        row: dict[str, Any] = {"task": task, "bandwidth": network.bandwidth, "latency": network.latency}
        row |= {"hosts": self.ranks, "seeds": len(seeds), "plan": plan, "dense": dense}
        row |= {"auto_s": mean(times[_AUTO]), "plan_s": mean(times[plan or DENSE]), "dense_s": known.get(dense)}
        for name, found in (
            ("of_plan", ratio_interval(times[_AUTO], times[plan or DENSE])),
            ("of_dense", ratio_interval(times[_AUTO], times[dense])),
            ("quality", interval(self._differences(task, network, seeds))),
        ):
            row[name], row[f"{name}_low"], row[f"{name}_high"] = found or (None, None, None)
        row["reached"] = sum(time is not None for time in times[_AUTO])
        row["error"] = comparison.problem(self.of(task, network))
        return row

    def _result(self, task: str, network: Network, arm: str, seed: int, timed: int) -> dict[str, Any] | None:
        one = self.finished.get(Training(task, arm, seed, network if arm in NETWORK_AWARE else None))
        if one is None or one.status != DONE:
            return None
        return self.result(one, self.timed_on(task, network, timed).get(arm))

    def _seconds(self, task: str, network: Network, arm: str, seeds: Sequence[int], timed: int) -> list[float | None]:
        """Return the seconds to quality with each seed, by steps that were timed with the plans of one."""
        found = [self._result(task, network, arm, seed, timed) for seed in seeds]
        return [None if result is None else result["time_to_quality_s"] for result in found]

    def _is_equal(self, task: str, plan: str, seeds: Sequence[int]) -> bool:
        found = [self._result(task, self.networks[0], plan, seed, seeds[0]) or {} for seed in seeds]
        quality, limit = (mean([result.get(name) for result in found]) for name in ("quality", "quality_limit"))
        return quality is not None and limit is not None and GOALS[task].reaches(quality, limit)

    def _differences(self, task: str, network: Network, seeds: Sequence[int]) -> list[float]:
        """Return by how much auto's quality is above that of dense with each seed: of a loss as a share of it."""
        found = []
        for seed in seeds:
            auto, dense = (self._result(task, network, arm, seed, seeds[0]) for arm in (_AUTO, DENSE))
            if auto is not None and dense is not None:
                scale = dense["quality"] if GOALS[task].lower else 1.0
                found.append((auto["quality"] - dense["quality"]) / scale)
        return found

    def describe(self, finished: Finished) -> dict[str, Any]:
        run, outcome = finished.run, finished.outcome
        place, is_training = None if run.network is None else str(run.network), isinstance(run, Training)
        found: dict[str, Any] = {"task": run.task, "network": place, "seed": run.seed}
        found |= {"arm": run.arm if is_training else None, **comparison.ending(finished)}
        found |= {"quality": outcome.get("quality", math.nan), "curve": outcome.get("curve", [])} if is_training else {}
        if "timed" in outcome:
            found["timed"] = {arm: row["median_s"] for arm, row in outcome["timed"].items()}
        return found

    def title(self, row: Row) -> str:
        return f"{row['task']}, {row['hosts']} hosts; {GOALS[row['task']].better}"

    def notes(self, rows: Sequence[Row]) -> list[str]:
        return [
            "best: the fixed plan that came soonest to quality on other seeds; behind it the faster one of dense in 32 "
            "and in 16 bits",
            "auto_s, best_s, dense_s: mean seconds to quality; of_best, of_dense: auto's over theirs, geometric mean "
            "over pairs of one seed, with its 95 % interval",
            "quality: of auto less that of dense in the end, of losses as a share",
        ]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="studies/hindsight.py",
        description="Train with every fixed plan, and choose for each task and network the one that comes soonest to "
        "the quality of dense exchange. Then train it with other seeds, and auto with them in a lab of each network. "
        "It needs a lab, and hours.",
    )
    parser.add_argument("--plans", metavar="P[,..]", help=f"fixed plans ({','.join(PLANS)})")
    lab_jobs.add_lab(parser, ",".join(NETWORKS))
    parser.add_argument("--choose", default=_CHOOSE, metavar="K[,..]", help="seeds that choose (%(default)s)")
    comparison.add_arguments(parser, _MINUTES)
    parser.set_defaults(tasks=_TASKS)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the trainings one after the other, and print a row for each task and network; 1 where one failed."""
    plans = comparison.read_arms(_STUDY, "--plans", arguments.plans, list(PLANS))
    plans = list(dict.fromkeys([*WHOLE, *plans]))
    choose = comparison.read_seeds(_STUDY, arguments.tasks, arguments.choose, GOALS, "--choose")
    test = comparison.read_seeds(_STUDY, arguments.tasks, arguments.seeds or _TEST, GOALS)
    if arguments.seeds is None:
        test = {task: list(range(seeds[0], seeds[0] + _MANY.get(task, len(seeds)))) for task, seeds in test.items()}
    links = lab_jobs.read_networks(_STUDY, arguments.networks)
    hosts = check_least(_STUDY, "--hosts", arguments.hosts, 2)
    comparison.check(_STUDY, arguments)
    lab_jobs.check_lab(_STUDY)
    comparison.check_tasks(_STUDY)
    with comparison.folder_of(arguments) as folder:
        study = Hindsight(folder, hosts, links, arguments.steps, choose, test)
        stages = _in_turn([study.stages(task, plans) for task in choose])
        minutes = arguments.limit or _MINUTES
        return comparison.run_all(study, f"{_STUDY}: {hosts} hosts", stages, minutes, arguments.json)


def _in_turn(stages: list[Iterator[list[Run]]]) -> Iterator[list[Run]]:
    """Yield a stage of every task after the other: what has no time left in the end are the last seeds."""
    while stages:
        for of_task in list(stages):
            stage = next(of_task, None)
            if stage is None:
                stages.remove(of_task)
            else:
                yield stage


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
