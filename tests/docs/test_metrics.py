"""docs/observability.md has every field that is written, and no other."""

import importlib.util
import json
import re

import numpy as np
import pytest
from tables import DOCS, check_types, documented
from tracing.chrome import check, names

import mpicomp
from mpicomp.mpi import LocalWorld


def compare(written, heading, left_out=()):
    fields = {name: kind for name, kind in documented("observability.md", heading).items() if name not in left_out}
    assert set(written) == set(fields)
    check_types(written, fields)


def test_a_step_record():
    reducer = mpicomp.Reducer("topk", "allgather", comm=LocalWorld(1).transports[0])
    reducer.reduce({"w": np.ones(10, np.float32)}, lr=0.1)
    line = json.loads(json.dumps(reducer.last_step.to_json()))
    compare(line, "A line of --metrics", left_out=["loss", "quality"])
    compare(line["phases_s"], "phases_s of a line", left_out=["compute", "update"])
    for bucket in line["buckets"]:
        compare(bucket, "An entry of buckets")
        assert list(bucket["phases_s"]) == ["compress", "exchange", "decode"]


def test_scalars_for_a_writer():
    """Anything with TensorBoard's ``add_scalar`` receives all; the numbers are those of the record."""
    added = {}

    class Writer:
        def add_scalar(self, tag, value, step):
            assert step == 7
            added[tag] = value

    reducer = mpicomp.Reducer("topk", "allgather", bucket_bytes=40, comm=LocalWorld(1).transports[0])
    reducer.reduce({"w": np.arange(10, dtype=np.float32), "v": np.ones(30, np.float32)})
    record = reducer.last_step
    record.add_scalars(Writer(), 7)
    assert added == record.scalars()
    line = record.to_json()
    numel = [bucket["numel"] for bucket in line["buckets"]]
    energy = [bucket["energy"] for bucket in line["buckets"]]
    assert len(numel) == 2
    expected = {"mpicomp/seconds": line["seconds"], "mpicomp/seconds/choosing": line["choosing_s"]}
    expected |= {f"mpicomp/seconds/{name}": seconds for name, seconds in line["phases_s"].items()}
    for tag, key in [("sent", "sent_bytes"), ("wire", "wire_bytes"), ("dense_ring", "dense_wire_bytes")]:
        expected[f"mpicomp/bytes/{tag}"] = line[key]
    expected["mpicomp/ratio"] = np.average([bucket["ratio_reached"] for bucket in line["buckets"]], weights=numel)
    expected["mpicomp/gain"] = np.average([bucket["gain"] for bucket in line["buckets"]], weights=energy)
    expected["mpicomp/skipped"] = 0
    assert added == pytest.approx(expected)


@pytest.fixture(scope="module")
def run(mpiexec, tmp_path_factory):
    """Train for a few steps on two ranks; give the object and the lines."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("run")
    words = ["-m", "mpicomp", "train", "--task", "digits", "--compressor", "topk", "--ratio", "0.05", "--steps", "3"]
    words += ["--collective", "allgather"]  # in which all ranks send as much as rank 0, whose lines they are
    words += ["--report", folder / "r.html"] if importlib.util.find_spec("msgspec") else []
    words += [
        "--against-dense",
        "--json",
        folder / "o.json",
        "--metrics",
        folder / "m.jsonl",
        "--trace",
        folder / "t.json",
    ]
    done = mpiexec(2, *words, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    assert not list(folder.glob("t.json.*"))
    return folder, json.loads((folder / "o.json").read_text()), lines


@pytest.mark.slow
def test_the_lines_of_a_run(run):
    _, _, lines = run
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        compare(line, "A line of --metrics")
        compare(line["phases_s"], "phases_s of a line")
        for bucket in line["buckets"]:
            compare(bucket, "An entry of buckets")


def test_the_object_of_a_run(run):
    folder, outcome, lines = run
    compare(outcome, "The object of --json")
    compare(outcome["phases_s"], "phases_s of a line")
    compare(outcome["quality"], "quality")
    compare(outcome["ratios"], "ratios")
    for plan in outcome["plans"]:
        compare(plan, "An entry of plans")
    assert "with dense exchange from the same seed" in outcome["verdict"]
    assert "not compared" not in outcome["verdict"]
    assert outcome["dense_bytes"] == 4 * outcome["parameters"] * outcome["steps"]
    assert outcome["wire_bytes"] == pytest.approx(sum(line["wire_bytes"] for line in lines), abs=8 * len(lines))
    if importlib.util.find_spec("msgspec"):
        page = (folder / "r.html").read_text()
        assert "Training digits: 2 runs compared" in page
        assert "topk" in page
        for section in ("loss", "step", "bytes", "runs"):
            assert f'<section id="{section}"' in page


def test_the_trace_of_a_run(run):
    folder, _, lines = run
    trace = json.loads((folder / "t.json").read_text())
    kinds = check(trace)
    documented = re.findall(r"^\| `(\w+)` \|", (DOCS / "observability.md").read_text(), re.MULTILINE)
    assert set(names(kinds)[1].values()) == set(documented)
    for line in lines:
        [event] = [kind for kind in kinds["X"] if kind["pid"] == 0 and kind["name"] == f"step {line['step']}"]
        assert event["args"]["wire_bytes"] == line["wire_bytes"]
