"""``mpicomp bench training`` on hosts of their own: what PyTorch sends crosses the links that are measured."""

import json

import pytest

pytestmark = [pytest.mark.lab, pytest.mark.timeout(110)]


@pytest.mark.slow
def test_exchanges_cross_the_links(lab, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    words = ["--task", "digits", "--exchange", "none,dense:ring,ddp,ddp-fp16", "--steps", "12", "--blocks", "3"]
    command = ["mpicomp", "bench", "training", *words, "--warm-up", "2", "--json", str(tmp_path / "out.json")]
    done = lab("--hosts", "2", "--bandwidth", "1gbit", "--latency", "0us", command=command, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    none, *others = rows
    assert none["link_bytes"] < 5000
    for row in others:
        assert row["hosts"] == 2
        assert row["wire_bytes"] < row["link_bytes"] < 1.2 * row["wire_bytes"] + 5000  # headers, and ranks that meet
