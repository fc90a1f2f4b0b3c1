"""Studies that start trainings: whoever ends them ends these, too."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STUDIES = Path(__file__).resolve().parents[2] / "studies"
PARENT = """
import os, signal, sys
from pathlib import Path
from mpicomp.bench.measure.jobs import execute
from comparison import Runner, Table, run_all

CHILD = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it

class Only(Runner):
    def run(self, run, left_s):
        execute([sys.executable, "-c", CHILD], os.environ, Path(sys.argv[1]), left_s)

    fill = summary = None

class Empty(Table):
    rows = told = title = cells = explained = None

run_all("study", "here", ["only"], Only(Path(sys.argv[1]).parent, 1), Empty(), 1.0, None)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, None)])
def test_a_signal_ends_what_was_started(number, status, tmp_path):
    log = tmp_path / "log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(log)],
        cwd=STUDIES,  # where the scripts find each other
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while not (log.exists() and log.read_text().strip()):
        time.sleep(0.05)
    child = int(log.read_text())
    parent.send_signal(number)
    parent.communicate()
    assert parent.returncode == (-signal.SIGINT if status is None else status)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
