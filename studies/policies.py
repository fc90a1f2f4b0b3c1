"""Seconds to the quality of dense exchange with every policy, on emulated networks: ``python studies/policies.py``."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import comparison
import lab_jobs
import numpy as np
from comparison import Column, Comparison, Fields, Row, finite, mean
from lab_jobs import DONE, Finished
from policy_runs import ARMS, DENSE, GOALS, NETWORK_AWARE, NETWORKS, QUICK_NETWORKS, Timing, Training, runs_of

from mpicomp.cli import run_program
from mpicomp.cli.options import check_writable
from mpicomp.errors import ConfigurationError
from mpicomp.setting_checks import check_least

_STUDY = "policies"
_MINUTES, _QUICK_MINUTES = 120.0, 45.0  # limits of the whole study

_MEANS = {
    "time_to_quality_s": "steps to quality times the median step",
    "summed_s": "steps to quality times the mean step",
    "steps_to_quality": "when the smoothed curve reaches the target",
    "median_step_s": "median step of the first seed's plans on the slowest rank, and `choosing_s`",
    "choosing_s": "mean of a step: for choosing plans and learning what they took",
    "wire_bytes": "that left a rank in the whole training",
    "quality": "on all held-out data, after all steps",
    "mean_quality": "the held-out curve averaged over steps: the area under it over its width",
}
LINK_FIELDS: Fields = {
    "task": ("string", "what was trained"),
    "bandwidth": ("string", "of each link"),
    "latency": ("string", "one way between hosts"),
    "hosts": ("integer", "with a rank each"),
}
ROW: Fields = {
    **LINK_FIELDS,
    "policy": ("string", "above"),
    "shared": ("boolean", "whether it was trained on one host, for all networks"),
    "steps": ("integer or null", "of a training; null where none was done"),
    "seeds": ("integer", "whose trainings were done"),
    "reached": ("integer", "of these, how many reached the target"),
    **comparison.means(_MEANS, {"median_step_s": "of `choosing_s`"}),
    "of_dense": ("number or null", "`time_to_quality_s` over that of dense with the same seeds"),
    "quality_limit": ("number or null", "mean of the limits of `quality`; null where dense lacks a seed"),
    "is_equal": ("boolean or null", "whether the mean quality is within it"),
    "error": ("string or null", "the first error of its runs, or how many were cut"),
}
_OUTCOME: Fields = {
    "steps": ("integer or null", "that a training did; null where it is not done, and of timings, as all below"),
    "median_step_s": ("number or null", "median step of the slowest rank while it trained"),
    "choosing_s": ("number or null", "mean of a step: for choosing plans and learning what they took"),
    "wire_bytes": ("number or null", "that left a rank"),
}
RUN: Fields = {
    "task": ("string", "what was trained"),
    "bandwidth": ("string or null", "of each link; null on one host"),
    "latency": ("string or null", "one way; null on one host"),
    "policy": ("string or null", "above; null where steps of all were timed"),
    "seed": ("integer", "of the model, the batches and the schemes"),
    **comparison.RUN_FIELDS,
    "timed": ("list of objects or null", "of a job that timed steps, for each policy, above; null for a training"),
    **_OUTCOME,
    "quality": ("number or null", "on all held-out data, after all steps"),
    "quality_limit": ("number or null", "from that of dense with the same seed"),
    "target": ("number or null", "of the curve: likewise, from its last point"),
    "steps_to_quality": ("number or null", "null where it is not reached"),
    "mean_quality": ("number or null", "the curve averaged over steps"),
    "curve": ("list of objects or null", "`step`, how many were done, and `quality` after them on some held-out data"),
}


class Policies(Comparison):
    """A row for each task, network and policy; of a task and network, those with the least time to quality first."""

    columns: Mapping[str, Column] = {
        "policy": ("policy", ""),
        "time_s": ("time_to_quality_s", ".1f"),
        "of_dense": ("of_dense", ".3f"),
        "summed_s": ("summed_s", ".1f"),
        "steps": ("steps_to_quality", ".0f"),
        "reached": lambda row: f"{row['reached']}/{row['seeds']}",
        "step_s": ("median_step_s", ".4f"),
        "choosing_ms": ("choosing_s", ".2f", 1e-3),
        "wire_MB": ("wire_bytes", ".4g", 1e6),
        "quality": ("quality", ".4f"),
        "equal": ("is_equal", ""),
        "mean_curve": ("mean_quality", ".4f"),
        "problem": lambda row: row["error"] or "",
    }

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for task in dict.fromkeys(run.task for run in self.finished if isinstance(run, Training)):
            for network in self.networks:
                timed, there = self.timed_on(task, network), self.of(task, network)
                seeds: dict[str, list[dict[str, Any]]] = {}
                for one in there:
                    if isinstance(one.run, Training):
                        done = seeds.setdefault(one.run.arm, [])
                        if one.status == DONE:
                            done.append(self.result(one, timed.get(one.run.arm)))
                links = {"bandwidth": network.bandwidth, "latency": network.latency, "hosts": self.ranks}
                found = []
                for name, done in seeds.items():
                    row = {"task": task, **links, **_row(name, task, done, seeds.get(DENSE, []))}
                    row["error"] = comparison.problem([
                        one for one in there if isinstance(one.run, Timing) or one.run.arm == name
                    ])  # fmt: skip
                    found.append(row)
                rows += sorted(found, key=lambda row: math.inf if (s := row["time_to_quality_s"]) is None else s)
        return rows

    def describe(self, finished: Finished) -> dict[str, Any]:
        run, outcome = finished.run, finished.outcome
        found: dict[str, Any] = dict.fromkeys(RUN)
        found |= {"task": run.task, "seed": run.seed, **comparison.ending(finished)}
        if run.network is not None:
            found |= {"bandwidth": run.network.bandwidth, "latency": run.network.latency}
        if isinstance(run, Timing):
            fields = ("ran", "steps", "median_s", "low_s", "high_s", "mean_s")
            timed = outcome.get("timed", {}).items()
            found["timed"] = [{"policy": name} | {field: row[field] for field in fields} for name, row in timed]
            return found
        found["policy"] = run.arm
        if finished.status == DONE:
            found |= {name: outcome[name] for name in _OUTCOME} | self.learned(finished)
            found["curve"] = [{"step": step, "quality": finite(quality)} for step, quality in outcome["curve"]]
        return found

    def title(self, row: Row) -> str:
        links = f"{row['hosts']} hosts, {row['bandwidth']}, {row['latency']}"
        return f"{row['task']}, {links}; {GOALS[row['task']].better}"

    def notes(self, rows: Sequence[Row]) -> list[str]:
        policies = list(dict.fromkeys(run.arm for run in self.finished if isinstance(run, Training)))
        looking = [name for name in policies if name in NETWORK_AWARE]
        tasks = dict.fromkeys(row["task"] for row in rows)
        targets = "; ".join(f"{task}: {GOALS[task].words} of the same seed" for task in tasks)
        counts = [row["steps"] for one in self.finished.values() for row in one.outcome.get("timed", {}).values()]
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
            f"shared: {', '.join(name for name in policies if name not in NETWORK_AWARE)} do not look at the network: "
            "trained on one host, once a seed, for all networks",
        ]
        not_shared = f"not shared: {', '.join(looking)} are trained in each lab with every seed"
        return [*lines, not_shared] if looking else lines


def _row(policy: str, task: str, done: Sequence[Row], dense: Sequence[Row]) -> dict[str, Any]:
    """Summarize the results of a policy over seeds."""
    judged = [result for result in done if result["target"] is not None]
    row: dict[str, Any] = {
        "policy": policy,
        "shared": policy not in NETWORK_AWARE,
        "steps": done[0]["steps"] if done else None,
        "seeds": len(done),
        "reached": sum(result["steps_to_quality"] is not None for result in judged),
        **comparison.over_seeds(_MEANS, done),
    }
    seeds, time_s = [result["seed"] for result in done], row["time_to_quality_s"]
    base = mean([result["time_to_quality_s"] for result in dense if result["seed"] in seeds])
    limit, quality = (mean([result[name] for result in judged]) for name in ("quality_limit", "quality"))
    row["of_dense"] = None if base is None or time_s is None else time_s / base
    row["quality_limit"] = limit
    row["is_equal"] = None if limit is None else quality is not None and GOALS[task].reaches(quality, limit)
    return row


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="studies/policies.py",
        description="Train with every policy until the quality of dense exchange is reached, and show for every task "
        "and network the seconds that takes, with bytes and qualities: mean and deviation over seeds. Policies that do "
        "not look at the network are trained on one host, the others in a lab for each network; there the steps of all "
        "are timed in turn. It needs a lab. Without options it takes two hours, with --quick 45 minutes.",
    )
    parser.add_argument("--quick", action="store_true", help="one seed, two networks, 45 minutes")
    parser.add_argument(
        "--policies",
        metavar="P[,..]",
        help="dense, which is run in any case, static, schedule, gravac, accordion, lgreco, flexible, auto, muon (all)",
    )
    parser.add_argument(
        "--picture", metavar="F.svg", help="draw times over those of dense in F-TASK.svg, for each task"
    )
    lab_jobs.add_lab(parser, None, ",".join(NETWORKS))
    comparison.add_arguments(parser, _MINUTES)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the trainings one after the other, and print a table for each task and network; 1 where one failed."""
    policies = comparison.read_arms(_STUDY, "--policies", arguments.policies, list(ARMS))
    seeds = "0" if arguments.quick and arguments.seeds is None else arguments.seeds
    seeds_of = comparison.read_seeds(_STUDY, arguments.tasks, seeds, GOALS)
    default = ",".join(QUICK_NETWORKS if arguments.quick else NETWORKS)
    links = lab_jobs.read_networks(_STUDY, default if arguments.networks is None else arguments.networks)
    hosts = check_least(_STUDY, "--hosts", arguments.hosts, 2)
    if arguments.keep is not None and "," in str(Path(arguments.keep).resolve()):
        raise ConfigurationError(f"{_STUDY}: --keep must be a folder without commas, got '{arguments.keep}'")
    if arguments.picture is not None:
        check_writable(_STUDY, arguments.picture)
    comparison.check(_STUDY, arguments)
    lab_jobs.check_lab(_STUDY)
    comparison.check_tasks(_STUDY)

    minutes = arguments.limit or (_QUICK_MINUTES if arguments.quick else _MINUTES)
    runs = runs_of(policies, links, seeds_of)
    with comparison.folder_of(arguments) as folder:
        study = Policies(folder, hosts, links, arguments.steps)
        first_line = f"{_STUDY}: {len(runs)} runs, {hosts} hosts"
        status = comparison.run_all(study, first_line, iter([runs]), minutes, arguments.json)
        if arguments.picture is not None:
            _draw(Path(arguments.picture), study.rows(), policies)
        return status


def _draw(path: Path, rows: Sequence[Row], policies: Sequence[str]) -> None:
    """Draw the time to quality of each policy over that of dense, by network: a picture for each task."""
    from matplotlib.figure import Figure

    for task in dict.fromkeys(row["task"] for row in rows):
        there = {
            (f"{row['bandwidth']}/s, {row['latency']}", row["policy"]): row["of_dense"]
            for row in rows
            if row["task"] == task and row["of_dense"] is not None
        }
        links = list(dict.fromkeys(link for link, _ in there))
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for policy in policies:
            axes.plot([there.get((link, policy), np.nan) for link in links], marker="o", markersize=3, label=policy)
        axes.set_xticks(range(len(links)), [link.replace(", ", "\n") for link in links])
        axes.set_yscale("log")
        axes.set_ylabel(f"{task}: time to the quality of dense, over its")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(path.with_stem(f"{path.stem}-{task}"), format="svg")


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
