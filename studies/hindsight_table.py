"""The table of hindsight: ``auto`` over the best fixed plan and over dense, in seconds to quality, paired by seeds."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

import comparison
import numpy as np
from comparison import DENSE, Training
from mpicomp.bench.measure.jobs import DONE
from mpicomp.bench.measure.networks import Network
from mpicomp.bench.measure.seed_means import mean
from policy_runs import GOALS, LOOKING, PLANS, Finished, Run
from policy_table import result_of, timed_on
from scipy import stats

AUTO = "auto"
WHOLE = (DENSE, "dense-bf16")
"""Plans that send every element whole; the faster one of them is what auto has to be as fast as."""
_NEAR = 1.1  # how much longer than the best on some network a plan may take with the first seed, to be tried with more


class HindsightRow(TypedDict):
    """A row of ``hindsight``."""

    task: Annotated[str, "what was trained"]
    bandwidth: Annotated[str, "of each link"]
    latency: Annotated[str, "one way between hosts"]
    hosts: Annotated[int, "with a rank each"]
    seeds: Annotated[int, "that are tested"]
    plan: Annotated[str | None, "the best fixed plan; null where no plan reached the target with all seeds that choose"]
    dense: Annotated[str, "the faster one of dense in 32 and in 16 bits"]
    auto_s: Annotated[float | None, "mean time to quality"]
    plan_s: Annotated[float | None, "of the best plan"]
    dense_s: Annotated[float | None, "of `dense`"]
    of_plan: Annotated[float | None, "time of `auto` over that of the best plan, geometric mean"]
    of_plan_low: Annotated[float | None, ""]
    of_plan_high: Annotated[float | None, ""]
    of_dense: Annotated[float | None, "the same over that of `dense`"]
    of_dense_low: Annotated[float | None, ""]
    of_dense_high: Annotated[float | None, ""]
    quality: Annotated[float | None, "of `auto` less that of dense in 32 bits; of a loss as a share"]
    quality_low: Annotated[float | None, ""]
    quality_high: Annotated[float | None, ""]
    reached: Annotated[int, "seeds with which `auto` reached the target"]
    error: Annotated[str | None, "the first error of its runs, or how many were cut"]


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


class Table(comparison.Table):
    """A row for each task and network.

    Parameters
    ----------
    finished : mapping of Run to Finished
        What was run so far.
    networks : sequence of Network
        Of the labs.
    hosts : int
        Of the labs.
    choose, test : mapping of str to list of int
        By task, the seeds on which the fixed plan is chosen, and others, on which it is compared.
    """

    def __init__(
        self,
        finished: Mapping[Run, Finished],
        networks: Sequence[Network],
        hosts: int,
        choose: Mapping[str, list[int]],
        test: Mapping[str, list[int]],
    ) -> None:
        self.choose, self.test = choose, test
        self._finished, self._networks, self._hosts = finished, networks, hosts

    def reaches(self, task: str, plan: str, seed: int) -> bool:
        """Return whether a plan came to the quality of dense with a seed."""
        found = self._result(task, self._networks[0], plan, seed, seed)
        return found is not None and found["steps_to_quality"] is not None

    def is_near(self, task: str, plan: str) -> bool:
        """Return whether a plan was near the best one on some network with the first seed."""
        seed = self.choose[task][:1]
        for network in self._networks:
            times = {own: self._seconds(task, network, own, seed, seed[0])[0] for own in PLANS}
            own, known = times[plan], [value for value in times.values() if value is not None]
            if own is not None and own <= _NEAR * min(known):
                return True
        return False

    def chosen(self, task: str, network: Network) -> str | None:
        """Return the fixed plan that comes soonest to quality on a network, of those of equal quality in the end."""
        seeds = self.choose[task]
        times = {plan: mean(self._seconds(task, network, plan, seeds, seeds[0])) for plan in PLANS}
        known = {plan: own for plan, own in times.items() if own is not None and self._is_equal(task, plan, seeds)}
        return min(known, key=lambda plan: known[plan]) if known else None

    def rows(self) -> list[dict[str, Any]]:
        """See `comparison.Table`."""
        return [self._row(task, network) for task in self.choose for network in self._networks]

    def _row(self, task: str, network: Network) -> dict[str, Any]:
        seeds, first = self.test[task], self.test[task][0]
        plan = self.chosen(task, network)
        times = {arm: self._seconds(task, network, arm, seeds, first) for arm in (*WHOLE, AUTO, plan or DENSE)}
        whole = {arm: mean(times[arm]) for arm in WHOLE}
        known = {arm: own for arm, own in whole.items() if own is not None}
        dense = min(known, key=lambda arm: known[arm]) if known else DENSE
        row: dict[str, Any] = {"task": task, "bandwidth": network.bandwidth, "latency": network.latency}
        row |= {"hosts": self._hosts, "seeds": len(seeds), "plan": plan, "dense": dense}
        row |= {"auto_s": mean(times[AUTO]), "plan_s": mean(times[plan or DENSE]), "dense_s": known.get(dense)}
        row |= _ends("of_plan", ratio_interval(times[AUTO], times[plan or DENSE]))
        row |= _ends("of_dense", ratio_interval(times[AUTO], times[dense]))
        row |= _ends("quality", interval(self._differences(task, network, seeds)))
        row["reached"] = sum(own is not None for own in times[AUTO])
        own = [one for run, one in self._finished.items() if run.task == task and run.network in (None, network)]
        row["error"] = comparison.problem(own)
        return row

    def _result(self, task: str, network: Network, arm: str, seed: int, timed: int) -> dict[str, Any] | None:
        run = Training(task, arm, seed, network if arm in LOOKING else None)
        own = self._finished.get(run)
        if own is None or own.status != DONE:
            return None
        return result_of(own, run, timed_on(task, network, self._finished, timed).get(arm), self._finished)

    def _seconds(self, task: str, network: Network, arm: str, seeds: Sequence[int], timed: int) -> list[float | None]:
        """Return the seconds to quality with each seed, by steps that were timed with the plans of one."""
        found = [self._result(task, network, arm, seed, timed) for seed in seeds]
        return [None if own is None else own["time_to_quality_s"] for own in found]

    def _is_equal(self, task: str, plan: str, seeds: Sequence[int]) -> bool:
        found = [self._result(task, self._networks[0], plan, seed, seeds[0]) for seed in seeds]
        own = mean([None if one is None else one["quality"] for one in found])
        limit = mean([None if one is None else one["quality_limit"] for one in found])
        return own is not None and limit is not None and GOALS[task].reaches(own, limit)

    def _differences(self, task: str, network: Network, seeds: Sequence[int]) -> list[float]:
        """Return by how much auto's quality is above that of dense with each seed: of a loss as a share of it."""
        found = []
        for seed in seeds:
            own, dense = (self._result(task, network, arm, seed, seeds[0]) for arm in (AUTO, DENSE))
            if own is not None and dense is not None:
                scale = dense["quality"] if GOALS[task].lower else 1.0
                found.append((own["quality"] - dense["quality"]) / scale)
        return found

    def told(self, finished: Finished) -> dict[str, Any]:
        """See `comparison.Table`."""
        run = finished.run
        place = None if run.network is None else str(run.network)
        told: dict[str, Any] = {"task": run.task, "network": place, "seed": run.seed}
        told |= {"arm": run.arm if isinstance(run, Training) else None, **comparison.ending(finished)}
        told |= {"quality": finished.quality, "curve": finished.curve} if isinstance(run, Training) else {}
        told |= {"timed": {arm: row["median_s"] for arm, row in finished.timed.items()}} if finished.timed else {}
        return told

    def title(self, row: Mapping[str, Any]) -> str:
        """See `comparison.Table`."""
        return f"{row['task']}, {row['hosts']} hosts; {GOALS[row['task']].better}"

    def cells(self, row: Mapping[str, Any]) -> dict[str, str]:
        """See `comparison.Table`."""
        return {
            "network": f"{row['bandwidth']}/{row['latency']}",
            "auto_s": _number(row["auto_s"]),
            "best_s": _number(row["plan_s"]),
            "dense_s": _number(row["dense_s"]),
            "of_best": _range(row, "of_plan", ".2f"),
            "of_dense": _range(row, "of_dense", ".2f"),
            "quality": _range(row, "quality", "+.2%" if GOALS[row["task"]].lower else "+.4f"),
            "reached": f"{row['reached']}/{row['seeds']}",
            "best": f"{row['plan'] or '-'}; {row['dense']}" + (f" ({row['error']})" if row["error"] else ""),
        }

    def explained(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """See `comparison.Table`."""
        return [
            "best: the fixed plan that came soonest to quality on other seeds; behind it the faster one of dense in 32 "
            "and in 16 bits",
            "auto_s, best_s, dense_s: mean seconds to quality; of_best, of_dense: auto's over theirs, geometric mean "
            "over pairs of one seed, with its 95 % interval",
            "quality: of auto less that of dense in the end, of losses as a share",
        ]


def _ends(name: str, found: tuple[float, float, float] | None) -> dict[str, float | None]:
    middle, low, high = (None, None, None) if found is None else found
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _range(row: Mapping[str, Any], name: str, form: str) -> str:
    if row[name] is None:
        return "-"
    return f"{row[name]:{form}} ({row[f'{name}_low']:{form}} to {row[f'{name}_high']:{form}})"
