"""Ranks compare which plugins they have loaded, in real jobs."""

import pytest

pytest.importorskip("torch")

PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar
import mpicomp

@mpicomp.register
@dataclass(frozen=True, repr=False)
class Mine(mpicomp.TopK):
    id: ClassVar[str] = "mine"
    paper: ClassVar[str] = "none: a test"
"""

SCRIPT = """
import os, sys
import numpy as np
import mpicomp
from mpicomp.job import launcher

rank = launcher.detect().rank
os.environ["MPICOMP_PLUGINS"] = sys.argv[1 + rank] if len(sys.argv) > 1 + rank else ""
try:
    reducer = mpicomp.Reducer({"id": "topk", "ratio": 0.5})
    reducer.reduce({"w": np.ones(10, np.float32)})
    settings = reducer.state_dict()["settings"]
    if rank == 0:
        print("fine", "plugins" in settings)
except mpicomp.MpicompError as error:
    sys.stdout.write(f"{type(error).__name__} {error}\\n")  # at once: the other rank prints as well
"""

WORDS = """
import sys
from mpicomp.job import launcher
from mpicomp.cli import main

sys.exit(main([word.replace("RANK", str(launcher.detect().rank)) for word in sys.argv[1:]]))
"""


@pytest.fixture
def files(tmp_path):
    """Two plugins of one name that differ, in separate folders, and a copy of the first one."""
    paths = [tmp_path / folder / "mine.py" for folder in ("first", "other", "copy")]
    for path, text in zip(paths, (PLUGIN, PLUGIN + "more = 1\n", PLUGIN), strict=True):
        path.parent.mkdir()
        path.write_text(text)
    return paths


@pytest.mark.slow
def test_ranks_with_equal_plugins_run(mpiexec, files):
    first, _, copy = files
    done = mpiexec(2, "-c", SCRIPT, first, copy, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine False"  # a checkpoint may be loaded with other plugins


def test_ranks_with_different_plugins_raise(mpiexec, files):
    first, other, _ = files
    done = mpiexec(2, "-c", SCRIPT, first, timeout=60)
    lines = done.stdout.strip().splitlines()
    assert len(set(lines)) == 1
    assert len(lines) == 2
    assert lines[0].startswith("DisagreementError reduce: plugins must be the same on all ranks, got mine (")
    assert lines[0].endswith(") on rank 0 and none on rank 1")
    done = mpiexec(2, "-c", SCRIPT, first, other, timeout=60)
    assert "DisagreementError reduce: plugins must be the same on all ranks, got mine (" in done.stdout


def test_ranks_raise_if_one_cannot_load_a_plugin(mpiexec, files, tmp_path):
    done = mpiexec(2, "-c", SCRIPT, files[0], tmp_path / "missing.py", timeout=60)
    assert done.stdout.count("ConfigurationError plugin: there is no file") == 2, done.stderr
    assert done.stdout.count("missing.py' (on rank 1)") == 2


def test_command_reports_a_failed_plugin_once_for_all_ranks(mpiexec, tmp_path):
    (tmp_path / "raises.py").write_text("1 / 0\n")
    train = ["train", "--task", "digits", "--steps", "2", "--plugin", tmp_path / "raises.py"]
    done = mpiexec(2, "-m", "mpicomp", *train, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("mpicomp: plugin: ") == 1
    assert "cannot be loaded: ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr
