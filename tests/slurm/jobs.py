"""Submit a template as a user does, and wait for what comes of it."""

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SLURM = Path(__file__).resolve().parents[2] / "slurm"
TEMPLATES = sorted(SLURM.glob("*.sbatch"))
BIN = Path(sys.executable).parent
LIMIT_S = 280  # minutes for what takes ten seconds on a quiet machine
_OVER = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY"}


@dataclass(frozen=True)
class Ended:
    """What came of a job: of its tasks the states and exit statuses, and what all of them printed."""

    number: str
    states: list[str]
    statuses: list[int]
    restarts: int
    printed: str


def submit(slurm, folder, template, *options, meanwhile=lambda number: None, **knobs):
    """Submit a template from a folder, which is made if missing, and return the result.

    `meanwhile` gets the job's number and is called until all is over.
    """
    folder.mkdir(exist_ok=True)
    # Ranks take turns on the cores of a machine that plays four nodes.
    knobs = {name: str(value) for name, value in ({"VENV": BIN.parent, "MPICOMP_NAPS": 1} | knobs).items()}
    # --export cannot take what has a comma in it; the environment can.
    listed = {name: value for name, value in knobs.items() if "," in value}
    export = ",".join(["ALL", *(f"{name}={value}" for name, value in knobs.items() if name not in listed)])
    done = slurm.run("sbatch", "--parsable", f"--export={export}", *options, SLURM / template, cwd=folder, **listed)
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()
    try:
        return _wait(slurm, number, folder, meanwhile)
    finally:
        slurm.run("scancel", number)


def _wait(slurm, number, folder, meanwhile):
    deadline = time.monotonic() + LIMIT_S
    while True:
        shown = slurm.run("scontrol", "--oneliner", "show", "job", number).stdout
        states = re.findall(r"\bJobState=(\w+)", shown)
        printed = "".join(file.read_text() for file in sorted(folder.glob(f"*-{number}*.out")))
        if states and set(states) <= _OVER:
            statuses = [int(status) for status in re.findall(r"\bExitCode=(\d+):", shown)]
            restarts = sum(int(times) for times in re.findall(r"\bRestarts=(\d+)", shown))
            return Ended(number, states, statuses, restarts, printed)
        if time.monotonic() > deadline:
            raise TimeoutError(f"no end after {LIMIT_S} s: {shown}\n{printed}\n{slurm.logs()}")
        meanwhile(number)
        time.sleep(0.2)
