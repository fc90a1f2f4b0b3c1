"""The files for contributors fit the project: the workflow, the hooks, the fragments of the changelog."""

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


def test_the_workflow_is_one():
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(WORKFLOW)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_it_runs_every_python_and_both_libraries():
    text = WORKFLOW.read_text()
    pythons = re.findall(r"Python :: (3\.\d+)", SETTINGS["metadata"]["classifiers"])
    listed = ", ".join(f'"{version}"' for version in pythons)
    assert f"python: [{listed}]" in text
    assert "mpi: [mpich, openmpi]" in text


def test_hooks_have_the_versions_of_continuous_integration():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name, repository in (("ruff", "ruff-pre-commit"), ("check-jsonschema", "check-jsonschema")):
        [version] = re.findall(rf"/{repository}\n    rev: v?(\S+)", hooks)
        assert version == pinned[name]
