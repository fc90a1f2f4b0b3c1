"""Stands in for the jobs of the study of policies."""

import itertools
import json
from pathlib import Path

from mpicomp.bench.measure.networks import Network
from policy_runs import Runner, runs_of

SLOW, FAST = Network("50mbit", "1ms"), Network("1gbit", "0us")
STEPS = {"digits": 200, "text-lstm": 300, "text-gpt": 300}
RATE = {"dense": 1.0, "bf16": 1.0, "static": 0.9, "auto": 0.95, "gravac": 0.8}  # how fast a policy learns
MEDIAN_S = {None: 0.1, SLOW: 2.0, FAST: 0.5}
CHOOSING_S = 0.125


class Jobs:
    """Stands in for processes: writes what `mpicomp` would, and remembers what it was told."""

    def __init__(self):
        self.commands = []
        self.failing = {}
        self.endless = set()
        self.rates = {}  # of runner by name, where they are not those of their policy

    def __call__(self, command, environment, log, limit_s):
        self.commands.append(command)
        words = dict(itertools.pairwise(command))
        name = Path(words["--json"]).stem
        if name in self.endless:
            return None
        log.write_text("begin\n" + self.failing.get(name, ""))
        if name in self.failing:
            return 3
        network = Network(words["--bandwidth"], words["--latency"]) if "lab" in command else None
        write = self.time if "bench" in command else self.train
        Path(words["--json"]).write_text(json.dumps(write(words, name, MEDIAN_S.get(network, 1.0))))
        return 0

    def train(self, words, name, median_s):
        task, policy = words["--task"], name.split("-")[-2]
        rate = self.rates.get(name, RATE.get(policy, 0.5))
        steps, every = int(words.get("--steps", STEPS[task])), int(words["--evaluate-every"])
        lines = []
        for step in range(steps):
            quality = quality_of(task, rate, step + 1, steps) if (step + 1) % every == 0 else None
            lines.append({"step": step, "quality": quality})
        Path(words["--metrics"]).write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = {"steps": steps, "median_step_s": median_s, "wire_bytes": 1_000_000 * steps, "choosing_s": CHOOSING_S}
        return found | {"quality": {"value": quality_of(task, rate, steps, steps)}}

    def time(self, words, name, median_s):
        seconds = {"median_s": median_s, "low_s": None, "high_s": None, "mean_s": 1.5 * median_s}
        rows = []
        for exchange in words["--exchange"].split(","):
            if exchange != "dense":
                assert Path(exchange.removeprefix("replay:")).read_text()
            rows.append({"exchange": exchange, "ran": "topk allgather", "steps": int(words["--steps"]), **seconds})
        return {"rows": rows}


def quality_of(task, rate, step, steps):
    """A loss that falls along a line, or an accuracy that rises along one."""
    share = rate * step / steps
    return 6 - 3 * share if task.startswith("text") else 0.5 + 0.4 * share


def all_of(folder, policies=("dense", "static", "auto"), networks=(SLOW, FAST), seeds=(0, 1), steps=None, left_s=1e6):
    runner = Runner(folder, 4, steps)
    for run in runs_of(policies, networks, {"text-lstm": list(seeds)}):
        runner.run(run, left_s)
    return runner


def names_of(jobs):
    return [Path(command[command.index("--json") + 1]).stem for command in jobs.commands]
