"""The template as it is shipped, on four nodes and short arrays."""

import json

import pytest
from slurm.jobs import submit

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_template_times_exchanges_and_kernels(slurm, mpich, tmp_path):
    knobs = {
        "NUMEL": "1024 4096",
        "COMPRESSORS": "topk",
        "RATIOS": "0.1",
        "COLLECTIVES": "allgather star-topk allreduce",
        "LIMIT": "0.5",
        "KERNELS": "65536",
    }
    job = submit(slurm, tmp_path, "bench.sbatch", "--cpus-per-task=1", **knobs)
    assert job.states == ["COMPLETED"], job.printed
    exchanges = json.loads((tmp_path / f"bench-{job.number}-collectives.json").read_text())["rows"]
    found = {(row["compressor"], row["collective"], row["numel"]) for row in exchanges}
    assert found >= {("topk", name, numel) for name in ("allgather", "star-topk") for numel in (1024, 4096)}
    assert found >= {("dense", "allreduce", numel) for numel in (1024, 4096)}
    assert {(row["ranks"], row["hosts"]) for row in exchanges} == {(4, 4)}
    kernels = json.loads((tmp_path / f"bench-{job.number}-kernels.json").read_text())["rows"]
    assert {"memcpy", "topk.compress"} <= {row["name"] for row in kernels}
    assert {row["numel"] for row in kernels} == {65536}
