"""docs/results.md and docs/studies.md have every field that is written, and no other."""

import json
import re

import estimators
import pytest
from regret import judged
from study_jobs import call
from tables import DOCS, check_types, documented

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


def test_what_is_written_of_estimators(tmp_path):
    path = tmp_path / "out.json"
    words = ["--numel", "2000", "--steps", "2", "--data", "laplace", "--ratio", "0.1", "--json", str(path)]
    assert call(estimators, words) == 0
    written = json.loads(path.read_text())
    compare(written, "The object of --json")
    compare(written["environment"], "environment")
    for row in written["rows"]:
        compare(row, "Rows of estimators", "studies.md")


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


def test_what_regret_adds():
    row = {"numel": 1, "compressor": "dense", "config": {}, "chosen": None, "span_s": 1.0, "predicted_s": None}
    row |= {"median_s": 1.0, "best_dense_s": 1.0}
    for item in judged([row, row | {"chosen": "dense ring"}]):
        added = {name: value for name, value in item.items() if name not in row}
        compare({"bandwidth": "1gbit", "latency": "0us"} | added, "Rows of regret", "studies.md")


def test_every_row_is_explained(tmp_path):
    path = tmp_path / "out.json"
    assert main(["bench", "kernels", "--numel", "2000", "--repeats", "2", "--ratio", "0.1", "--json", str(path)]) == 0
    page = (DOCS / "results.md").read_text()
    for name in {row["name"] for row in json.loads(path.read_text())["rows"]}:
        assert name.endswith((".compress", ".pack", ".unpack")) or f"`{name}`" in page


def test_gradients_saved_by_the_page_are_read(tmp_path, monkeypatch, capsys):
    code, *_ = re.findall(r"```python\n(.*?)```", (DOCS / "studies.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert call(estimators, ["--gradients", "mine.npz", "--ratio", "0.1"]) == 0
    assert "mine" in capsys.readouterr().out
