"""docs/results.md has every field that is written, and no other."""

import json

import pytest
from tables import check_types, documented

from mpicomp.cli import main


def compare(written, heading, page="results.md"):
    fields = documented(page, heading)
    assert list(written) == list(fields)
    check_types(written, fields)


def test_what_is_written(tmp_path):
    path = tmp_path / "out.json"
    words = ["--numel", "2000", "--repeats", "2", "--compressor", "topk", "--ratio", "0.1", "--json", str(path)]
    assert main(["bench", "kernels", *words]) == 0
    written = json.loads(path.read_text())
    compare(written, "The object of --json")
    compare(written["environment"], "environment")
    for row in written["rows"]:
        compare(row, "Rows of kernels")


@pytest.mark.slow
def test_what_is_written_by_ranks(mpiexec, tmp_path):
    path = tmp_path / "out.json"
    options = ["--numel", "2000", "--ratio", "0.1", "--limit", "0.05", "--json", path]
    done = mpiexec(1, "-m", "mpicomp", "bench", "collectives", *options, timeout=100)
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    compare(written, "The object of --json")
    compare(written["environment"], "environment")
    compare(written["environment"]["job"], "job")
    for row in written["rows"]:
        compare(row, "Rows of collectives")


@pytest.mark.slow
def test_what_is_written_by_trainings(mpiexec, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    path = tmp_path / "out.json"
    options = ["--task", "digits", "--exchange", "none,topk,ddp", "--steps", "6", "--blocks", "6", "--warm-up", "1"]
    done = mpiexec(1, "-m", "mpicomp", "bench", "training", *options, "--json", path, timeout=100)
    assert done.returncode == 0, done.stderr
    written = json.loads(path.read_text())
    compare(written, "The object of --json")
    compare(written["environment"]["job"], "job")
    for row in written["rows"]:
        compare(row, "Rows of training")
