"""mpicomp simulate, from a file to a table, rows and a picture."""

import json
import math
import xml.etree.ElementTree as ElementTree

import pytest
from mpicomp.bench.simulate.measured import Bucket, Gradient, Measured
from tables import check_types, documented

from mpicomp import cli
from mpicomp.cost import CostModel, Network


@pytest.fixture
def source(tmp_path):
    buckets = [Bucket((Gradient("b", (500, 300), 0.01),)), Bucket((Gradient("a", (500, 700), 0.03),))]
    path = tmp_path / "measured.json"
    measured = Measured("text-lstm", 4, 4, CostModel(Network(4)), 0.01, 0.03, 0.01, buckets)
    path.write_text(json.dumps(measured.to_json()))
    return path


def run(source, *words):
    return cli.main(["simulate", "--from", str(source), "--ranks", "2,16", *map(str, words)])


def test_rows_are_as_documented(source, tmp_path, capsys):
    path = tmp_path / "rows.json"
    words = ["--compressor", "qsgd", "--bandwidth", "100mbit", "--overlap", "both", "--json", path]
    assert run(source, *words) == 0
    written = json.loads(path.read_text())
    fields = documented("simulate.md", "What comes out")
    for row in written["rows"]:
        assert set(row) == set(fields)
        check_types(row, fields)
    assert [(row["ranks"], row["plan"], row["overlap"]) for row in written["rows"]] == [
        (ranks, plan, overlap) for ranks in (2, 16) for plan in ("dense", "qsgd") for overlap in (True, False)
    ]
    text = capsys.readouterr().out
    assert "500,000 elements in 2 buckets, 0.05 s a step without exchange" in text


@pytest.mark.slow
def test_output_draws_every_cell(source, tmp_path):
    pytest.importorskip("matplotlib")
    path, rows = tmp_path / "p.svg", tmp_path / "rows.json"
    assert run(source, "--compressor", "qsgd", "--json", rows, "-o", path) == 0
    root = ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg")
    words = " ".join(root.itertext())
    for word in ("qsgd", "ranks", "speed-up over dense exchange", "16"):
        assert word in words
    grid = json.loads(rows.read_text())["grid"]
    assert len(grid) == 2 * 13
    assert grid[0]["speedup"] > 1 > grid[-1]["speedup"] * 0.9


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compressor", "auto"], "auto needs what it learns of elements"),
        (["--ranks", "one"], "--ranks must be whole numbers"),
        (["--ranks", "1"], "--ranks must be an integer of at least 2"),
        (["--per-host", "0"], "--per-host must be an integer of at least 1"),
        (["--switch", "fast"], "--switch must be a number with bit"),
        (["--latency", "5"], "--latency must be a number with ns"),
        (["--compressor", "topk", "--collective", "allreduce"], "does not fit collective 'allreduce'"),
    ],
)
def test_wrong_options_are_refused(source, capsys, words, message):
    assert run(source, *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_measured_training_gives_rows(mpiexec, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    path = tmp_path / "measured.json"
    done = mpiexec(2, "-m", "mpicomp", "train", "--task", "digits", "--steps", "24", "--measured", path, timeout=100)
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    names = [gradient["name"] for bucket in content["buckets"] for gradient in bucket]
    assert len(names) == len(set(names)) > 2
    assert all(
        0 < gradient["ready_s"] <= 1.5 * content["backward_s"] for bucket in content["buckets"] for gradient in bucket
    )
    longest = max(sum(math.prod(gradient["shape"]) for gradient in bucket) for bucket in content["buckets"])
    assert {(timed["ranks"], timed["numel"]) for timed in content["dense"]} == {(2, longest // 4), (2, longest)}
    rows = tmp_path / "rows.json"
    words = ["--bandwidth", "10mbit", "--latency", "1ms", "--per-host", "1", "--json", rows]
    assert run(path, *words) == 0
    assert {row["plan"] for row in json.loads(rows.read_text())["rows"]} == {"dense", "auto"}
