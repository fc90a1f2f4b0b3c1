"""The table of policies: steps and seconds to the quality of dense, from the held-out curves of trainings."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

import comparison
import numpy as np
from comparison import DENSE, Training
from mpicomp.bench.measure.jobs import DONE
from mpicomp.bench.measure.networks import Network
from mpicomp.bench.measure.seed_means import cell, finite, mean
from numpy.typing import NDArray
from policy_runs import GOALS, LOOKING, Finished, Run, Timing

_MEANS = (
    "time_to_quality_s",
    "summed_s",
    "steps_to_quality",
    "median_step_s",
    "choosing_s",
    "wire_bytes",
    "quality",
    "mean_quality",
)
"""Values of a seed of which a row has mean and deviation."""


class PolicyRow(TypedDict):
    """A row of ``policies``."""

    task: Annotated[str, "what was trained"]
    bandwidth: Annotated[str, "of each link"]
    latency: Annotated[str, "one way between hosts"]
    hosts: Annotated[int, "with a rank each"]
    policy: Annotated[str, "above"]
    shared: Annotated[bool, "whether it was trained on one host, for all networks"]
    steps: Annotated[int | None, "of a training; null where none was done"]
    seeds: Annotated[int, "whose trainings were done"]
    reached: Annotated[int, "of these, how many reached the target"]
    time_to_quality_s: Annotated[float | None, "steps to quality times the median step"]
    time_to_quality_s_deviation: Annotated[float | None, ""]
    summed_s: Annotated[float | None, "steps to quality times the mean step"]
    summed_s_deviation: Annotated[float | None, ""]
    steps_to_quality: Annotated[float | None, "when the smoothed curve reaches the target"]
    steps_to_quality_deviation: Annotated[float | None, ""]
    median_step_s: Annotated[
        float | None,
        "median step of the first seed's plans on the slowest rank, and `choosing_s`",
    ]
    median_step_s_deviation: Annotated[float | None, "of `choosing_s`"]
    choosing_s: Annotated[float | None, "mean of a step: for choosing plans and learning what they took"]
    choosing_s_deviation: Annotated[float | None, ""]
    wire_bytes: Annotated[float | None, "that left a rank in the whole training"]
    wire_bytes_deviation: Annotated[float | None, ""]
    quality: Annotated[float | None, "on all held-out data, after all steps"]
    quality_deviation: Annotated[float | None, ""]
    mean_quality: Annotated[float | None, "the held-out curve averaged over steps: the area under it over its width"]
    mean_quality_deviation: Annotated[float | None, ""]
    of_dense: Annotated[float | None, "`time_to_quality_s` over that of dense with the same seeds"]
    quality_limit: Annotated[float | None, "mean of the limits of `quality`; null where dense lacks a seed"]
    is_equal: Annotated[bool | None, "whether the mean quality is within it"]
    error: Annotated[str | None, "the first error of its runs, or how many were cut"]


class PolicyRun(TypedDict):
    """A training of ``policies``, or a job that timed steps."""

    task: Annotated[str, "what was trained"]
    bandwidth: Annotated[str | None, "of each link; null on one host"]
    latency: Annotated[str | None, "one way; null on one host"]
    policy: Annotated[str | None, "above; null where steps of all were timed"]
    seed: Annotated[int, "of the model, the batches and the schemes"]
    words: Annotated[list[str], "after `mpicomp`, without files"]
    status: Annotated[str, "`done`, `failed` or `cut`"]
    error: Annotated[str | None, "last line of the error"]
    kept: Annotated[bool, "whether its files were there before"]
    seconds: Annotated[float, "that the run took, when it was run"]
    timed: Annotated[
        list[dict[str, Any]] | None,
        "of a job that timed steps, for each policy, above; null for a training",
    ]
    steps: Annotated[int | None, "that a training did; null where it is not done, and of timings, as all below"]
    median_step_s: Annotated[float | None, "median step of the slowest rank while it trained"]
    choosing_s: Annotated[float | None, "mean of a step: for choosing plans and learning what they took"]
    wire_bytes: Annotated[float | None, "that left a rank"]
    quality: Annotated[float | None, "on all held-out data, after all steps"]
    quality_limit: Annotated[float | None, "from that of dense with the same seed"]
    target: Annotated[float | None, "of the curve: likewise, from its last point"]
    steps_to_quality: Annotated[float | None, "null where it is not reached"]
    mean_quality: Annotated[float | None, "the curve averaged over steps"]
    curve: Annotated[
        list[dict[str, Any]] | None,
        "`step`, how many were done, and `quality` after them on some held-out data",
    ]


def smoothed(values: Sequence[float]) -> NDArray[np.float64]:
    """Return the centred moving mean over three values; the first and the last one stay as they are.

    So the last one reaches a target exactly when the final quality does.

    Examples
    --------
    >>> smoothed([4.0, 1.0, 1.0, 7.0]).tolist()
    [4.0, 2.0, 3.0, 7.0]
    """
    found = np.array(values, float)
    found[1:-1] = (found[:-2] + found[1:-1] + found[2:]) / 3
    return found


def steps_to(curve: Sequence[tuple[int, float]], target: float, lower: bool) -> float | None:
    """Return the first step at which a curve reaches a target.

    The curve is smoothed, made monotone (the best so far), and linear between measurements.

    Parameters
    ----------
    curve : sequence of (int, float)
        Steps that were done, ascending, and the quality measured after them. What is not finite is worse than
        everything else.
    target : float
        The quality.
    lower : bool
        Whether a lower quality is the better one.

    Returns
    -------
    float or None
        None where it is not reached. The first measurement where that is good enough: what was before is not known.

    Examples
    --------
    >>> steps_to([(10, 4.0), (20, 3.0), (30, 2.0)], 2.5, lower=True)
    25.0
    """
    sign = 1.0 if lower else -1.0
    values = np.array([sign * quality for _, quality in curve])
    values[~np.isfinite(values)] = np.inf
    best = np.minimum.accumulate(smoothed(values.tolist()))
    reached = np.flatnonzero(best <= sign * target)
    if reached.size == 0:
        return None
    place = int(reached[0])
    if place == 0 or math.isinf(best[place - 1]):
        return float(curve[place][0])
    share = (best[place - 1] - sign * target) / (best[place - 1] - best[place])
    return float(curve[place - 1][0] + share * (curve[place][0] - curve[place - 1][0]))


def mean_over_steps(curve: Sequence[tuple[int, float]]) -> float | None:
    """Return the mean of a curve over steps, from its first measurement to the last: the area under it over its width.

    Examples
    --------
    >>> mean_over_steps([(10, 4.0), (20, 2.0), (40, 2.0)])
    2.3333333333333335
    """
    steps, values = np.array([step for step, _ in curve], float), np.array([quality for _, quality in curve])
    if not np.isfinite(values).all():
        return None
    if steps.size == 1:
        return float(values[0])
    return float(((values[1:] + values[:-1]) / 2 * np.diff(steps)).sum() / (steps[-1] - steps[0]))


def _learnt(own: Finished, run: Training, finished: Mapping[Run, Finished]) -> dict[str, Any]:
    """Return the quality of a finished training, and its targets where dense ended with the same seed."""
    goal = GOALS[run.task]
    learnt: dict[str, Any] = {
        "quality": finite(own.quality),
        "quality_limit": None,
        "target": None,
        "steps_to_quality": None,
        "mean_quality": mean_over_steps(own.curve),
    }
    dense = finished.get(Training(run.task, DENSE, run.seed, None))
    if dense is None or dense.status != DONE:
        return learnt
    # On the way fewer held-out data are looked at than in the end: each is compared with its like.
    learnt["quality_limit"] = finite(goal.target(dense.quality))
    learnt["target"] = target = finite(goal.target(dense.curve[-1][1]))
    if target is not None:
        learnt["steps_to_quality"] = steps_to(own.curve, target, goal.lower)
    return learnt


def result_of(
    own: Finished, run: Training, timed: Mapping[str, Any] | None, finished: Mapping[Run, Finished]
) -> dict[str, Any]:
    """Return the results of a finished training, with the row of its plans where they were timed on the network."""
    result: dict[str, Any] = {"seed": run.seed}
    result |= {"steps": int(own.outcome["steps"]), "wire_bytes": float(own.outcome["wire_bytes"])}
    result |= _learnt(own, run, finished) | {"choosing_s": float(own.outcome["choosing_s"])}
    result |= dict.fromkeys(("median_step_s", "time_to_quality_s", "summed_s"))
    if timed is not None:
        # Plans that are run again are not chosen again.
        result["median_step_s"] = median_s = float(timed["median_s"]) + result["choosing_s"]
        reached = result["steps_to_quality"]
        if reached is not None:
            result["time_to_quality_s"] = reached * median_s
            result["summed_s"] = reached * (float(timed["mean_s"]) + result["choosing_s"])
    return result


class Table(comparison.Table):
    """A row for each task, network and policy; of a task and network, those with the least time to quality first.

    Parameters
    ----------
    finished : mapping of Run to Finished
        What was run so far.
    networks : sequence of Network
        Of the labs.
    hosts : int
        Of the labs.
    """

    def __init__(self, finished: Mapping[Run, Finished], networks: Sequence[Network], hosts: int) -> None:
        self._finished = finished
        self._networks = networks
        self._hosts = hosts

    def rows(self) -> list[dict[str, Any]]:
        """See `comparison.Table`."""
        finished = self._finished
        trained = [(run, own) for run, own in finished.items() if isinstance(run, Training)]
        rows = []
        for task in dict.fromkeys(run.task for run, _ in trained):
            for network in self._networks:
                timed = timed_on(task, network, finished)
                there = [(run, own) for run, own in trained if run.task == task and run.network in (None, network)]
                seeds: dict[str, list[dict[str, Any]]] = {run.arm: [] for run, _ in there}
                for run, own in there:
                    if own.status == DONE:
                        seeds[run.arm].append(result_of(own, run, timed.get(run.arm), finished))
                links = {"bandwidth": network.bandwidth, "latency": network.latency, "hosts": self._hosts}
                found = [
                    {"task": task, **links, **_row(name, task, done, seeds.get(DENSE, []))}
                    | {"error": _problem(name, task, network, finished)}
                    for name, done in seeds.items()
                ]
                rows += sorted(found, key=_least_time)
        return rows

    def told(self, finished: Finished) -> dict[str, Any]:
        """See `comparison.Table`."""
        run = finished.run
        told: dict[str, Any] = {
            "task": run.task,
            "bandwidth": None if run.network is None else run.network.bandwidth,
            "latency": None if run.network is None else run.network.latency,
            "policy": run.arm if isinstance(run, Training) else None,
            "seed": run.seed,
            **comparison.ending(finished),
            "timed": None,
        }
        told |= dict.fromkeys(("steps", "median_step_s", "choosing_s", "wire_bytes"))
        told |= dict.fromkeys(("quality", "quality_limit", "target", "steps_to_quality", "mean_quality", "curve"))
        if isinstance(run, Timing):
            fields = ("ran", "steps", "median_s", "low_s", "high_s", "mean_s")
            told["timed"] = [
                {"policy": name} | {field: row[field] for field in fields} for name, row in finished.timed.items()
            ]
        elif finished.status == DONE:
            told |= {name: finished.outcome[name] for name in ("steps", "median_step_s", "choosing_s", "wire_bytes")}
            told |= _learnt(finished, run, self._finished)
            told["curve"] = [{"step": step, "quality": finite(quality)} for step, quality in finished.curve]
        return told

    def title(self, row: Mapping[str, Any]) -> str:
        """See `comparison.Table`."""
        links = f"{row['hosts']} hosts, {row['bandwidth']}, {row['latency']}"
        return f"{row['task']}, {links}; {GOALS[row['task']].better}"

    def cells(self, row: Mapping[str, Any]) -> dict[str, str]:
        """See `comparison.Table`."""
        return {
            "policy": row["policy"],
            "time_s": cell(row, "time_to_quality_s", ".1f"),
            "of_dense": "-" if row["of_dense"] is None else format(row["of_dense"], ".3f"),
            "summed_s": cell(row, "summed_s", ".1f"),
            "steps": cell(row, "steps_to_quality", ".0f"),
            "reached": f"{row['reached']}/{row['seeds']}",
            "step_s": cell(row, "median_step_s", ".4f"),
            "choosing_ms": cell(row, "choosing_s", ".2f", 1e-3),
            "wire_MB": cell(row, "wire_bytes", ".4g", 1e6),
            "quality": cell(row, "quality", ".4f"),
            "equal": {None: "-", True: "yes", False: "no"}[row["is_equal"]],
            "mean_curve": cell(row, "mean_quality", ".4f"),
            "problem": row["error"] or "",
        }

    def explained(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """See `comparison.Table`."""
        policies = list(dict.fromkeys(run.arm for run in self._finished if isinstance(run, Training)))
        shared = [name for name in policies if name not in LOOKING]
        looking = [name for name in policies if name in LOOKING]
        tasks = dict.fromkeys(row["task"] for row in rows)
        targets = "; ".join(f"{task}: {GOALS[task].words} of the same seed" for task in tasks)
        counts = [row["steps"] for own in self._finished.values() for row in own.timed.values()]
        timed = f"; {max(counts)} steps" if counts else ""
        timed += f" ({min(counts)} where they are slowest)" if counts and min(counts) < max(counts) else ""
        lines = [
            "means over seeds, deviations in brackets; seeds are paired: the same model and batches for every policy",
            f"target: {targets}",
            "steps: the first at which the held-out curve (moving mean over 3 measurements, best so far, linear "
            "between) reaches it; - where some seed does not",
            "step_s: median of the first seed's plans run again, all policies in turn in one lab, and the mean that "
            "choosing took in training. time_s: steps times that; summed_s: with the mean step in place of the median"
            + timed,
            "equal: whether the mean of final qualities is within the mean target; mean_curve: held-out quality "
            "averaged over steps",
            f"shared: {', '.join(shared)} do not look at the network: trained on one host, once a seed, for all "
            "networks",
        ]
        if looking:
            lines.append(f"not shared: {', '.join(looking)} are trained in each lab with every seed")
        return lines


def timed_on(
    task: str, network: Network, finished: Mapping[Run, Finished], seed: int | None = None
) -> dict[str, dict[str, Any]]:
    """Return, by policy, the rows of steps that were timed on a network, with the plans of a seed or of any."""
    for run, own in finished.items():
        asked = isinstance(run, Timing) and seed in (None, run.seed)
        if asked and (run.task, run.network, own.status) == (task, network, DONE):
            return own.timed
    return {}


def _least_time(row: Mapping[str, Any]) -> float:
    return math.inf if row["time_to_quality_s"] is None else float(row["time_to_quality_s"])


def _row(
    policy: str, task: str, done: Sequence[Mapping[str, Any]], dense: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Summarise the results of a policy over seeds."""
    judged = [own for own in done if own["target"] is not None]
    row: dict[str, Any] = {
        "policy": policy,
        "shared": policy not in LOOKING,
        "steps": done[0]["steps"] if done else None,
        "seeds": len(done),
        "reached": sum(own["steps_to_quality"] is not None for own in judged),
    }
    row |= comparison.over_seeds(_MEANS, done)
    seeds = [own["seed"] for own in done]
    base, time_s = mean([own["time_to_quality_s"] for own in dense if own["seed"] in seeds]), row["time_to_quality_s"]
    limit, quality = mean([own["quality_limit"] for own in judged]), mean([own["quality"] for own in judged])
    row["of_dense"] = None if base is None or time_s is None else time_s / base
    row["quality_limit"] = limit
    row["is_equal"] = None if limit is None else quality is not None and GOALS[task].reaches(quality, limit)
    return row


def _problem(policy: str, task: str, network: Network, finished: Mapping[Run, Finished]) -> str | None:
    """Return the last line of the first error among a policy's runs; where none failed, how many were cut."""
    own = [one for run, one in finished.items() if run.task == task and run.network in (None, network)]
    own = [one for one in own if isinstance(one.run, Timing) or one.run.arm == policy]
    return comparison.problem(own)
