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
    assert found.keys() == {"images", "closures", "characters"}
    for name, script in found.items():
        assert script["replicas"] == [True, True], name
        assert script["resumed"][1], name  # with a collective that is named
        # Clipping before step() does not go with an exchange during backward: that is said once.
        clips = name != "images"
        assert script["overlaps"] == [not clips] * 2, name
        for warnings in script["warnings"]:
            about = [each for each in warnings if "while backward goes on" in each]
            assert len(about) == clips, warnings
