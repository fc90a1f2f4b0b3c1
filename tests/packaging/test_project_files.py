"""The files for newcomers and contributors fit the project: README, workflow, hooks."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg")
README = (ROOT / "README.md").read_text()
[TURNED_OVER] = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
TRAINING = """
import torch
torch.manual_seed(0)
ToyModel = lambda: torch.nn.Linear(3, 2)
my_share_of_the_data = [(torch.full((4, 3), 1.0 + rank), torch.zeros(4, 2))] * 3
"""


@pytest.mark.mpi(max_size=2)
def test_readme_script_trains(comm):
    pytest.importorskip("torch")
    names = {"rank": comm.rank}
    exec(TRAINING + "".join(line[1:] for line in TURNED_OVER.splitlines(keepends=True)), names)
    assert names["optimizer"].reducer.last_step.step == 2
    assert len(set(comm.allgather(names["model"].weight.detach().numpy().tobytes()))) == 1
    names["optimizer"].close()


def test_workflows_are_valid():
    pytest.importorskip("check_jsonschema")
    workflows = map(str, WORKFLOW.parent.glob("*.yml"))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_workflow_runs_every_python_and_both_libraries():
    text = WORKFLOW.read_text()
    pythons = re.findall(r"Python :: (3\.\d+)", SETTINGS["metadata"]["classifiers"])
    listed = ", ".join(f'"{version}"' for version in pythons)
    assert f"python: [{listed}]" in text
    assert "mpi: [mpich, openmpi]" in text


def test_hooks_have_the_versions_of_the_workflow():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name, repository in (("ruff", "ruff-pre-commit"), ("check-jsonschema", "check-jsonschema")):
        [version] = re.findall(rf"/{repository}\n    rev: v?(\S+)", hooks)
        assert version == pinned[name]
