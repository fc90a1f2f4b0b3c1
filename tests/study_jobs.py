"""Studies without their processes: how they are called, and what `mpicomp` would write in their jobs."""

import itertools
import json
from pathlib import Path

from lab_jobs import Network

from mpicomp.cli import run_program

SLOW, FAST = Network("50mbit", "1ms"), Network("1gbit", "0us")
STEPS = {"digits": 200, "text-lstm": 300, "text-gpt": 300}
RATES = {"dense": 1.0, "bf16": 1.0, "static": 0.9, "auto": 0.999, "qsgd4": 0.995}  # how fast an arm learns
STEP_S = {"qsgd4": 0.5, "topk1": 0.1, "dense-bf16": 0.9}  # of a plan, over that of dense
MEDIAN_S = {None: 0.1, SLOW: 2.0, FAST: 0.5}
CHOOSING_S = 0.125


def call(study, words):
    """Run a study with these words and return the exit status."""
    return run_program(lambda: study.parser().parse_args(words), study.run)


def stand_in(monkeypatch, jobs):
    """Have studies call ``jobs`` in place of `lab_jobs.execute`, and let them begin here."""
    monkeypatch.setattr("lab_jobs.execute", jobs)
    monkeypatch.setattr("lab_jobs.find_launcher", lambda: Path("/bin/mpiexec"))
    monkeypatch.setattr("lab_jobs.find_mpi", lambda launcher: "mpich")
    monkeypatch.setattr("lab_jobs.check_lab", lambda command: None)
    monkeypatch.setattr("comparison.check_tasks", lambda command: None)
    return jobs


class Jobs:
    def __init__(self, rates=()):
        self.commands, self.failing, self.rates = [], {}, dict(rates)

    @property
    def names(self):
        return [Path(command[command.index("--json") + 1]).stem for command in self.commands]

    def __call__(self, command, environment, log, limit_s):
        self.commands.append(command)
        words = dict(itertools.pairwise(command))
        name = Path(words["--json"]).stem
        log.write_text("begin\n" + self.failing.get(name, ""))
        if name in self.failing:
            return 3
        network = Network(words["--bandwidth"], words["--latency"]) if "lab" in command else None
        write = self.time if "bench" in command else self.train
        Path(words["--json"]).write_text(json.dumps(write(words, name, MEDIAN_S.get(network, 1.0))))
        return 0

    def train(self, words, name, median_s):
        task, arm = words["--task"], name.split("-")[-2]
        rate, steps = self.rates.get(name, RATES.get(arm, 0.5)), int(words.get("--steps", STEPS[words["--task"]]))
        qualities = [quality_of(task, rate * (step + 1) / steps) for step in range(steps)]
        every = int(words["--evaluate-every"])
        lines = [
            {"step": step, "quality": None if (step + 1) % every else quality} for step, quality in enumerate(qualities)
        ]
        Path(words["--metrics"]).write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = {"steps": steps, "median_step_s": median_s, "wire_bytes": 1_000_000 * steps, "choosing_s": CHOOSING_S}
        return found | {"quality": {"value": qualities[-1]}}

    def time(self, words, name, median_s):
        rows = []
        for exchange in words["--exchange"].split(","):
            own_s = median_s * next((share for arm, share in STEP_S.items() if f"-{arm}-" in exchange), 1.0)
            seconds = {"median_s": own_s, "low_s": None, "high_s": None, "mean_s": 1.5 * own_s}
            rows.append({"exchange": exchange, "ran": "topk allgather", "steps": int(words["--steps"]), **seconds})
        return {"rows": rows}


def quality_of(task, share):
    """A loss that falls along a line, or an accuracy that rises along one."""
    return 6 - 3 * share if task.startswith("text") else 0.5 + 0.4 * share
