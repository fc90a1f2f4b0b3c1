"""Scripts of the shapes that public ones have, on two hosts, where gradients are exchanged during backward."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.timeout(110)]

SCRIPTS = Path(__file__).resolve().parents[1] / "script_shapes.py"


def test_scripts_on_two_hosts_resume(lab, tmp_path):
    pytest.importorskip("torch")
    command = ["python", str(SCRIPTS), str(tmp_path)]
    done = lab("--hosts", "2", "--bandwidth", "1gbit", "--latency", "0us", command=command, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 3
    for name, script in found.items():
        assert all(script["replicas"]), name
        assert script["resumed"][1], name  # with a collective that is named
