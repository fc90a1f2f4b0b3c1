"""Seconds to the quality of dense exchange on emulated networks: ``python studies/time_to_quality.py``.

A fixed plan learns the same on every network: it trains once a seed, on one host, and some of its steps are timed in a
lab of each network. A policy whose plans change trains in each lab. PyTorch's DDP learns like dense exchange and
is timed alone. With ``--pages`` the numbers are written between the marks of pages.
"""

import itertools
import json
import math
import subprocess
import sys
import tempfile
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import lab_jobs
import numpy as np
from lab_jobs import Network
from mpicomp.bench.measure.intervals import median_interval
from study_rows import Rows, Study, show

from mpicomp.errors import MpicompError

_STUDY = "time_to_quality"
_COLUMNS = {
    "task": "", "network": "", "arm": "", "time_s": ".2f", "time_sd": ".2f", "of_dense": ".3f", "least": ".3f",
    "most": ".3f", "summed_s": ".2f", "steps": ".0f", "reached": "d", "seeds": "d", "step_s": ".4f",
    "step_low_s": ".4f", "step_high_s": ".4f", "choosing_ms": ".2f", "step_MB": ".4g",
    "quality": ".4f", "equal": "",
}  # fmt: skip
_ONE_HOST = "one host"
_DENSE = "dense"
_EXACT = (_DENSE, "dense-bf16")  # whose faster one all ratios are over
_MUON, _MUON_EVERY = "muon", 10  # steps from one exchange to the next, over which its seconds are averaged
_TOUR = "tour"  # a task of its own: the bars of `mpicomp tour`
_STEP = ("step_s", "step_low_s", "step_high_s")  # fields: a step's median and the ends of its 95 % interval
_BLOCKS = 8  # of a peer's timed steps
_MIN_LOOKS = 20  # at held-out data, where the number of steps is given
_PINNED = ("--compressor", "topk", "--ratio", "0.01", "--collective", "allgather")
_TWICE = ("--compressor", "topk", "--ratio", "0.02", "--collective", "allgather")  # lgreco halves the bytes of that


def _policy(words: Sequence[str] = (), **config: Any) -> tuple[str, ...]:
    return ("--policy", json.dumps(config), *words)


def _plan(collective: str, **config: Any) -> tuple[str, ...]:
    return ("--compressor", json.dumps(config), "--collective", collective, "--warmup", "0")


# Made for trainings of some hundred steps: with the published windows of 500 steps nothing would be found in them, and
# with a least gain of 0.7 hardly anything would be compressed under error feedback.
POLICIES: dict[str, tuple[str, ...]] = {
    "schedule": _policy(_PINNED, id="schedule", begin=0.25, end=0.01, steps=60),
    "accordion": _policy(_PINNED, id="accordion"),
    "lgreco": _policy(_TWICE, id="lgreco"),
    "gravac": _policy(id="gravac", least=0.01, scaling="geometric", window=10, epsilon=0.1),
    "flexible": _policy(id="flexible", every=50),
    "auto": (),
}
PLANS: dict[str, tuple[str, ...]] = {
    _DENSE: ("--compressor", "dense"),
    "static": _PINNED,
    _MUON: ("--exchange", "muon", "--every", str(_MUON_EVERY), "--collective", "two-phase"),
    "dense-bf16": _plan("scatter-reduce", id="dense", wire="bf16"),
    "qsgd8": _plan("two-phase", id="qsgd", bits=8, rounding="nearest"),
    "qsgd4": _plan("two-phase", id="qsgd", bits=4, rounding="nearest"),
    "onebit": _plan("two-phase", id="onebit"),
    "powersgd4": _plan("auto", id="powersgd", rank=4),
    "topk10q4": _plan("allgather", id="topk", ratio=0.1, wire="q4"),
    "topk3q4": _plan("allgather", id="topk", ratio=0.03, wire="q4"),
    "topk1q4": _plan("allgather", id="topk", ratio=0.01, wire="q4"),
    "star3": _plan("star-topk", id="topk", ratio=0.03),
}
PEERS = {"ddp": _DENSE, "ddp-fp16": _DENSE}  # exchanges of `bench training`, and the plan that learns the same
# Rows of the README's table, and their arms
_README = {
    "DDP, fp16 hook": "ddp-fp16", "dense, 32 bits": _DENSE, "dense, 16 bits": "dense-bf16", "top-k at 1 %": "static",
    "`auto`": "auto", "LocalMuon": _MUON,
}  # fmt: skip

_DRAWN = {name: _README[name] for name in ("DDP, fp16 hook", "top-k at 1 %", "`auto`", "LocalMuon")}
_TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5)  # ratios


@dataclass(frozen=True)
class Goal:
    """The target quality of a task: ``factor * last quality of dense + offset``."""

    lower: bool  # a lower quality is the better one
    factor: float
    offset: float
    look_every: int  # steps between looks at held-out data
    steps: int | None = None  # of a training; None for those that the task is tuned for

    def target(self, dense: float) -> float:
        return self.factor * dense + self.offset

    def reaches(self, quality: float, target: float) -> bool:
        return quality <= target if self.lower else quality >= target


GOALS = {
    "digits": Goal(False, 1.0, -0.015, 5),
    "text-lstm": Goal(True, 1.01, 0.0, 10),
    "text-gpt": Goal(True, 1.01, 0.0, 10, 120),
}

Curve = Sequence[tuple[int, float]]
"""Number of steps done, ascending, and the quality after them on the held-out data of looks on the way."""


def train(task: str, network: Network | None, arm: str, seed: int, steps: int | None, hosts: int) -> dict[str, Any]:
    """Train with one rank on each host of a lab, or on this host; return the qualities and the seconds of steps."""
    goal = GOALS[task]
    every = goal.look_every if steps is None else min(goal.look_every, max(1, steps // _MIN_LOOKS))
    steps = goal.steps if steps is None else steps
    words = ["train", "--task", task, "--seed", str(seed), "--no-verdict", "--evaluate-every", str(every)]
    words += [] if steps is None else ["--steps", str(steps)]
    with tempfile.TemporaryDirectory(prefix="mpicomp-study-") as folder:
        outcome_path, lines_path = Path(folder) / "outcome.json", Path(folder) / "lines.jsonl"
        files = ["--json", str(outcome_path), "--metrics", str(lines_path)]
        lab_jobs.run(hosts, network, [*words, *(POLICIES | PLANS)[arm], *files], watch=lambda line: None)
        outcome = json.loads(outcome_path.read_text())
        lines = [json.loads(line) for line in lines_path.read_text().splitlines()]
    seconds = [line["seconds"] for line in lines]
    return step_seconds(seconds, _MUON_EVERY if arm == _MUON else 1) | {
        "curve": [(line["step"] + 1, round(line["quality"], 5)) for line in lines if line["quality"] is not None],
        "quality": outcome["quality"]["value"],
        "choosing_s": outcome["choosing_s"],
        "step_wire_bytes": round(outcome["wire_bytes"] / len(lines)),
        "seconds": [round(step_s, 4) for step_s in seconds] if arm in POLICIES else [],
    }


def time_peer(task: str, network: Network, arm: str, steps: int, hosts: int) -> dict[str, Any]:
    """Time an exchange that is not mpicomp's in a lab."""
    with tempfile.TemporaryDirectory(prefix="mpicomp-study-") as folder:
        path, words = Path(folder) / "rows.json", ["bench", "training", "--task", task, "--exchange", arm]
        words += ["--steps", str(steps), "--blocks", str(_BLOCKS), "--warm-up", "8", "--json", str(path)]
        lab_jobs.run(hosts, network, words, watch=lambda line: None)
        [row] = json.loads(path.read_text())["rows"]
    found = {"step_s": row["median_s"], "step_low_s": row["low_s"], "step_high_s": row["high_s"], "choosing_s": 0.0}
    return found | {"step_wire_bytes": round(row["wire_bytes"]), "seconds": []}


def take_tour() -> dict[str, Any]:
    """Run the tour and return the lines of its bars."""
    with tempfile.TemporaryDirectory(prefix="mpicomp-study-") as folder:
        program = [sys.executable, "-m", "mpicomp", "tour", "--report", str(Path(folder) / "tour.html")]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MpicompError(f"tour ended with status {done.returncode}: {done.stderr[-500:]}")
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    begin = next(place for place, line in enumerate(lines) if line.startswith("Seconds to a "))
    return {"printed": list(itertools.takewhile(lambda line: not line.startswith("To that "), lines[begin:]))}


def step_seconds(seconds: Sequence[float], every: int = 1) -> dict[str, float | None]:
    """Return the median of a step and its 95 % interval; of means over windows of ``every`` steps.

    >>> step_seconds([9.0, 1.0, 3.0, 1.0, 5.0], 2)
    {'step_s': 2.5, 'step_low_s': None, 'step_high_s': None}
    """
    windows = np.reshape(seconds[len(seconds) % every :], (-1, every)).mean(axis=1)
    low, high = median_interval(windows.tolist()) or (None, None)
    return {"step_s": float(np.median(windows)), "step_low_s": low, "step_high_s": high}


def smoothed(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the centred moving mean over three values; the first and the last one are unchanged.

    So the last one reaches a target exactly when the final quality does.

    >>> smoothed([4.0, 1.0, 1.0, 7.0]).tolist()
    [4.0, 2.0, 3.0, 7.0]
    """
    found = np.array(values, float)
    found[1:-1] = (found[:-2] + found[1:-1] + found[2:]) / 3
    return found


def steps_to(curve: Curve, target: float, lower: bool) -> float | None:
    """Return the first step at which a curve reaches a target; None where it does not.

    The curve is smoothed, made monotone (the best so far), and linear between measurements. Its first measurement is
    returned where that is good enough: earlier ones are not known. Values that are not finite are the worst.

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


def seconds_of_first(steps: float, seconds: Sequence[float]) -> float:
    """Return the seconds of the first steps, of which the last one may be a part.

    >>> seconds_of_first(2.5, [4.0, 1.0, 2.0, 8.0])
    6.0
    """
    return float(np.interp(steps, range(len(seconds) + 1), [0.0, *np.cumsum(seconds)]))


def judged(
    learned: Mapping[str, Any], timed: Mapping[str, Any], dense: Mapping[str, Any], goal: Goal
) -> dict[str, Any]:
    """Return a seed's results on a network, from the row where it learned, a timed one, and that of dense exchange."""
    steps = steps_to(learned["curve"], goal.target(dense["curve"][-1][1]), goal.lower)
    found = {name: timed[name] for name in (*_STEP, "choosing_s", "step_wire_bytes")}
    found |= {"quality": learned["quality"], "limit": goal.target(dense["quality"]), "steps_to": steps}
    time_s = None if steps is None else steps * timed["step_s"]
    summed_s = seconds_of_first(steps, timed["seconds"]) if steps is not None and timed["seconds"] else time_s
    return found | {"time_s": time_s, "summed_s": summed_s}


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each task, network and arm, over the seeds that dense was trained with; the fastest first.

    Ratios are over dense exchange in 32 or 16 bits, whichever is faster: their mean over seeds, least and most.
    """
    rows = [row for row in rows if row["task"] != _TOUR]
    by_key = {(row["task"], row["network"], row["arm"], row["seed"]): row for row in rows if row["steps"] != "timed"}
    timings = {(row["task"], row["network"], row["arm"]): row for row in rows if row["steps"] == "timed"}
    lines = []
    for task, network in dict.fromkeys((row["task"], row["network"]) for row in rows if row["network"] != _ONE_HOST):
        goal, of_arm = GOALS[task], dict[str, dict[int, dict[str, Any]]]()
        for (other, place, arm, seed), row in by_key.items():
            dense = by_key.get((task, _ONE_HOST, _DENSE, seed))
            for name in (arm, *(peer for peer, like in PEERS.items() if like == arm)):
                timed = row if place == network else timings.get((task, network, name))
                if other == task and place in (_ONE_HOST, network) and dense is not None and timed is not None:
                    of_arm.setdefault(name, {})[seed] = judged(row, timed, dense, goal)
        times = {arm: _mean([seed["time_s"] for seed in of_arm[arm].values()]) for arm in _EXACT if arm in of_arm}
        reached = {arm: time_s for arm, time_s in times.items() if time_s is not None}
        base = of_arm[min(reached, key=reached.__getitem__)] if reached else {}
        found = []
        for arm, seeds in of_arm.items():
            time_s = _mean([seed["time_s"] for seed in seeds.values()])
            pairs = [(found["time_s"], base[seed]["time_s"]) for seed, found in seeds.items() if seed in base]
            ratios = [mine / others for mine, others in pairs if mine is not None] if time_s is not None else []
            dense_s = _mean([others for _, others in pairs])
            qualities = [seed["quality"] for seed in seeds.values()]
            found.append({
                "task": task, "network": network, "arm": arm, "time_s": time_s,
                "time_sd": _deviation([seed["time_s"] for seed in seeds.values()]),
                "of_dense": None if time_s is None or not dense_s else time_s / dense_s,
                "least": min(ratios, default=None), "most": max(ratios, default=None),
                "summed_s": _mean([seed["summed_s"] for seed in seeds.values()]),
                "steps": _mean([seed["steps_to"] for seed in seeds.values()]),
                "reached": sum(seed["steps_to"] is not None for seed in seeds.values()), "seeds": len(seeds),
                **{name: _mean([seed[name] for seed in seeds.values()]) for name in _STEP},
                "choosing_ms": 1e3 * fmean(seed["choosing_s"] for seed in seeds.values()),
                "step_MB": fmean(seed["step_wire_bytes"] for seed in seeds.values()) / 1e6,
                "quality": fmean(qualities),
                "equal": goal.reaches(fmean(qualities), fmean(seed["limit"] for seed in seeds.values())),
            })  # fmt: skip
        lines += sorted(found, key=lambda line: math.inf if line["time_s"] is None else line["time_s"])
    return lines


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None where a seed has no value, since a mean of the others would flatter."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _deviation(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return stdev(known) if len(known) == len(values) > 1 else None


def rows(_: Rows, arguments: Namespace) -> Iterator[tuple[Any, ...]]:
    networks = lab_jobs.read_networks(_STUDY, arguments.networks)
    lab_jobs.check_lab(_STUDY)
    hosts, steps = arguments.hosts, arguments.steps
    arms = dict.fromkeys([_DENSE, *arguments.arms])
    if _TOUR in arguments.tasks:
        yield (_TOUR, "200mbit/0us", _TOUR, 0, None), take_tour
    tasks = [task for task in arguments.tasks if task != _TOUR]
    for seed, task, arm in itertools.product(arguments.seeds, tasks, arms):
        if arm in PLANS:
            yield (task, _ONE_HOST, arm, seed, steps), train, task, None, arm, seed, steps, hosts
        for network in networks:
            key = task, str(network), arm, seed
            timed = arguments.timed * (3 if arm == _MUON else 1)  # several windows
            if arm in POLICIES:
                yield (*key, steps), train, task, network, arm, seed, steps, hosts
            elif seed == arguments.seeds[0] and arm in PEERS:
                yield (*key, "timed"), time_peer, task, network, arm, timed, hosts
            elif seed == arguments.seeds[0]:
                yield (*key, "timed"), train, task, network, arm, seed, timed, hosts


def parts_of_pages(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the part of a page for each mark, from rows: a table for each task, and the tour's bars."""
    lines, parts = table(rows), {}
    for task in dict.fromkeys(line["task"] for line in lines):
        cells = {(line["arm"], line["network"]): line for line in lines if line["task"] == task}
        networks = list(dict.fromkeys(network for _, network in cells))
        heads = [*map(_words, networks), "MB a step", "loss" if GOALS[task].lower else "accuracy"]
        found = [f"| exchange | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        for name, arm in _README.items():
            there = [cells[arm, network] for network in networks if (arm, network) in cells]
            if len(there) == len(networks):
                sent, qualities = ([line[key] for line in there] for key in ("step_MB", "quality"))
                ends = f"{_range(sent, '.2g')} | {_range(qualities, '.3f')}"
                found.append(f"| {name} | {' | '.join(map(_cell, there))} | {ends} |")
        origin, seeds = rows[-1], max(line["seeds"] for line in cells.values())
        spread = f", and its least and most over {seeds} seeds where they differ" if seeds > 1 else ", one seed"
        caption = (
            f"Seconds, and in brackets their ratio to the faster dense one{spread}; or how many seeds reached that. "
            f"Commit `{origin['commit']}`, "
            f"{origin['cores']} cores that copy memory at {origin['copy_gb_s']} GB/s."
        )
        parts[task] = "\n".join([*found, "", *textwrap.wrap(caption, 120)])
    for row in rows:
        if row["task"] == _TOUR:
            parts[_TOUR] = "\n".join(["```text", *row["printed"], "```"])
    return parts


def _range(values: Sequence[float], form: str) -> str:
    return " to ".join(dict.fromkeys(format(end, form) for end in (min(values), max(values))))


def _words(network: str) -> str:
    bandwidth, _, latency = network.partition("/")
    text = f"{bandwidth[:-4]} {bandwidth[-4].upper()}bit/s"
    return text if latency.startswith("0") else f"{text}, {latency[:-2]} {latency[-2:]}"


def _cell(line: Mapping[str, Any]) -> str:
    if line["time_s"] is None:
        return f"{line['reached']} of {line['seeds']} seeds"
    least, most = (format(line[end], ".2f") for end in ("least", "most"))
    spread = f", {least} to {most}" if least != most else ""
    digits = ".0f" if line["time_s"] >= 10 else ".2f"
    return f"{line['time_s']:{digits}} ({line['of_dense']:.2f}{spread})"


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the ratio of time to that of dense exchange on each network, a panel for each task."""
    import matplotlib as mpl  # a table needs none
    from matplotlib.figure import Figure
    from mpicomp.bench.report.plots import STYLE

    tasks = list(dict.fromkeys(line["task"] for line in lines))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        for axes, task in zip(figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0], tasks, strict=True):
            of_task = [line for line in lines if line["task"] == task]
            networks = list(dict.fromkeys(line["network"] for line in of_task))
            for name, arm in _DRAWN.items():
                ratios = {line["network"]: line["of_dense"] for line in of_task if line["arm"] == arm}
                axes.plot([ratios.get(network) or math.nan for network in networks], "o-", label=name.strip("`"))
            axes.axhline(1.0, color="black", linewidth=1)
            axes.set(title=task, yscale="log")
            axes.set_xticks(
                range(len(networks)),
                [_words(network).replace(" ", "\n", 1).replace(", ", "\n") for network in networks],
            )
            axes.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
            axes.minorticks_off()
        figure.axes[0].set_ylabel("time to quality, of dense")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(_DRAWN))
        figure.savefig(path, metadata={"Date": None})


def filled(page: str, parts: Mapping[str, str]) -> str:
    r"""Return a page with the parts between ``<!-- measured: NAME -->`` and ``<!-- end -->``.

    >>> filled("<!-- measured: a -->\n1\n<!-- end -->", {"a": "2"})
    '<!-- measured: a -->\n2\n<!-- end -->'
    """
    for name, part in parts.items():
        begin, mark, rest = page.partition(f"<!-- measured: {name} -->\n")
        if mark:
            page = f"{begin}{mark}{part}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page


def tables(measured: Rows, arguments: Namespace) -> None:
    made = [row for row in measured.made if row["steps"] in (arguments.steps, "timed")]
    show("Time to the quality of dense exchange", table(made), [
        "time_s: steps to the target times the median step, mean and deviation over seeds; none where a seed misses it",
        "summed_s: of policies with their measured steps; target: dense less 0.015 (digits), times 1.01 (text)",
        "of_dense: over the faster of dense and dense-bf16, with the least and the most of a seed",
    ], _COLUMNS)  # fmt: skip
    for page in map(Path, arguments.pages):
        page.write_text(filled(page.read_text(), parts_of_pages(measured.made)))
    if arguments.picture:
        draw(table(made), Path(arguments.picture))


STUDY = Study(
    _STUDY,
    "Train until the quality of dense exchange is reached, and show for every task and emulated network the seconds "
    "that takes with each policy or plan. It needs a lab, and hours without options.",
    ("task", "network", "arm", "seed", "steps"),
    rows,
    tables,
    {
        "--tasks": (f"{_TOUR},text-gpt,text-lstm,digits", "T[,..]", f"{', '.join(GOALS)}; {_TOUR}"),
        "--arms": (
            ",".join(_README.values()),
            "A[,..]",
            f"{', '.join([*PLANS, *POLICIES, *PEERS])}; dense in any case",
        ),
        **lab_jobs.options("50mbit/1ms,200mbit/1ms,1gbit/0us,2.5gbit/0us"),
        "--seeds": ("0,1,2", "K[,..]", "of trainings"),
        "--steps": (None, "S", "of a training (those of the task; text-gpt: 120)"),
        "--timed": (24, "S", "steps that are timed in a lab"),
        "--pages": ("", "F.md[,..]", "write the numbers between the marks of pages"),
        "--picture": ("", "F.svg", "draw the ratios to dense (needs matplotlib)"),
    },
    {"hosts": 2, "steps": 1, "timed": 8},
    {"tasks": lambda _: [*GOALS, _TOUR], "arms": lambda _: [*PLANS, *POLICIES, *PEERS]},
)

if __name__ == "__main__":
    STUDY.main()
