"""Commands with the examples and a task as plugins."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
TASK = Path(__file__).with_name("tiny_task.py")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def mpicomp(mpiexec, tmp_path):
    """Run the command in a temporary folder, as so many ranks, and return its output."""

    def start(*words, ranks=1):
        done = mpiexec(ranks, "-P", "-m", "mpicomp", *words, cwd=tmp_path, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return start


def plugins(*files):
    return [word for file in files for word in ("--plugin", file)]


def test_list_shows_the_files_of_plugins(mpicomp):
    files = [EXAMPLES / name for name in ("sign_topk.py", "tree.py", "flush.py")]
    written = json.loads(mpicomp("list", "--json", *plugins(*files)))
    found = {entry["name"]: entry["plugin"] for kind in written.values() for entry in kind if entry["plugin"]}
    assert found == dict(zip(("sign-topk", "tree", "flush"), map(str, files), strict=True))
    of = {entry["name"]: entry for entry in written["compressors"]}
    assert of["sign-topk"]["wire_bytes_per_element"] < 0.01 * 2
    assert "tree" in of["dense"]["collectives"]
    assert f"\n    plugin: {files[0]}\n" in mpicomp("list", *plugins(files[0]))
    assert "plugin" not in mpicomp("list")


def test_train_runs_a_task_compressor_and_policy_of_plugins(mpicomp, tmp_path):
    files = [TASK, EXAMPLES / "sign_topk.py", EXAMPLES / "flush.py"]
    words = ["--task", "plane", "--compressor", "sign-topk", "--ratio", "0.1", "--collective", "allgather"]
    words += ["--policy", '{"id": "flush", "every": 5}']
    out = ["--no-verdict", "--json", "run.json", "--metrics", "steps.jsonl"]
    mpicomp("train", *plugins(*files), *words, *out, ranks=2)
    outcome = json.loads((tmp_path / "run.json").read_text())
    assert (outcome["task"], outcome["compressor"], outcome["ranks"]) == ("plane", "sign-topk", 2)
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    dense = [step["step"] for step in steps if step["buckets"][0]["compressor"]["id"] == "dense"]
    assert set(range(4, 20, 5)) <= set(dense)
