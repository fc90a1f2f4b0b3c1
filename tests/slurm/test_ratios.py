"""The template as it is shipped: a job array whose tasks write one table."""

import csv
import json

import pytest
from marks import slow
from slurm.jobs import submit

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_tasks_are_joined_in_a_table(slurm, mpich, tmp_path):
    knobs = {"TASK": "digits", "COMPRESSORS": "topk", "RATIOS": "0.05 0.01", "COLLECTIVE": "allgather", "STEPS": "5"}
    options = ("--array=0-2", "--nodes=2", "--cpus-per-task=1")
    job = submit(slurm, tmp_path, "ratios.sbatch", *options, **knobs)
    assert job.states == ["COMPLETED"] * 3, job.printed
    folder = tmp_path / f"ratios-{job.number}"
    assert sorted(file.name for file in folder.iterdir()) == ["0.json", "1.json", "2.json", "table.csv"]
    with (folder / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["compressor"], float(row["ratio"])) for row in rows] == [("dense", 1), ("topk", 0.01), ("topk", 0.05)]
    for row, task in zip(rows, (0, 2, 1), strict=True):
        run = json.loads((folder / f"{task}.json").read_text())
        assert float(row["quality"]) == run["quality"]["value"]
        assert float(row["median_step_s"]) == run["median_step_s"]
        assert (int(row["wire_bytes"]), int(row["dense_wire_bytes"])) == (run["wire_bytes"], run["dense_wire_bytes"])
        assert (run["task"], run["ranks"], run["steps"]) == ("digits", 2, 5)
    assert int(rows[1]["wire_bytes"]) < int(rows[2]["wire_bytes"]) < int(rows[0]["wire_bytes"])


@pytest.mark.parametrize("options", [["--array=7"], slow(["--array=7-8"])])
def test_task_without_a_case_names_the_cases(slurm, mpich, stand_in, tmp_path, options):
    knobs = {"VENV": stand_in, "LAUNCH": "none"}
    job = submit(slurm, tmp_path, "ratios.sbatch", *options, **knobs)
    assert set(job.states) == {"FAILED"}
    assert set(job.statuses) == {2}
    assert job.printed.count("ratios: there are 7 cases; submit with --array=0-6\n") == len(job.states)
    assert "mpicomp train" not in job.printed
