"""What travels between the hosts of a lab: recorded bytes, and trainings."""

import json
import shlex

import pytest

EXCHANGE = """
import json, sys
from pathlib import Path
import numpy as np
from mpi4py import MPI
import mpicomp

config, collective, numel, steps = sys.argv[1:]
reducer = mpicomp.Reducer(json.loads(config), collective)
random = np.random.default_rng(MPI.COMM_WORLD.rank)
pool = [{"w": random.normal(size=int(numel)).astype(np.float32)} for _ in range(4)]
recorded = 0.0
for step in range(int(steps)):
    reducer.reduce(pool[step % 4])
    recorded += reducer.last_step.wire_bytes
reducer.close()
MPI.COMM_WORLD.Barrier()
counted = int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())
everyones = MPI.COMM_WORLD.gather((recorded, counted))
if everyones is not None:
    print(json.dumps(everyones))
"""

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(110)]


@pytest.mark.parametrize("hosts", [3, 4])
@pytest.mark.parametrize(
    ("config", "collective", "steps"),
    [
        ({"id": "dense"}, "allreduce", 10),
        ({"id": "dense", "wire": "bf16"}, "scatter-reduce", 20),
        ({"id": "topk", "ratio": 0.01}, "allgather", 90),  # so that the probes at the start are a few per cent
        ({"id": "topk", "ratio": 0.1}, "star-topk", 20),
    ],
    ids=["allreduce", "scatter-reduce", "allgather", "star-topk"],
)
def test_links_count_the_recorded_bytes(lab, hosts, config, collective, steps):
    done = lab(
        *("--hosts", str(hosts), "--bandwidth", "1gbit", "--latency", "0us"),
        command=["python", "-c", EXCHANGE, json.dumps(config), collective, "1000000", str(steps)],
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    recorded, counted = zip(*json.loads(done.stdout), strict=True)
    assert len(counted) == len(recorded) == hosts
    # Libraries share the work of a reduction or a broadcast unevenly among three ranks; the sum is the same.
    assert sum(counted) == pytest.approx(sum(recorded), rel=0.05)
    if hosts == 4 and collective != "star-topk":
        assert counted == pytest.approx(recorded, rel=0.05)


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


def test_shards_stay_inside_hosts(lab, tmp_path):
    """Between hosts travel the messages of each rank's shard: what FSDP gathers and scatters would be several times."""
    pytest.importorskip("torch")
    out = tmp_path / "out.json"
    words = ["--task", "text-gpt", "--steps", "8", "--shard", "2", "--compressor", "dense", "--collective", "ring"]
    counted = "; cat /sys/class/net/eth0/statistics/tx_bytes"
    train = shlex.join(["mpicomp", "train", *words, "--no-verdict", "--json", str(out)])
    options = ("--hosts", "2", "--ppn", "2", "--bandwidth", "1gbit", "--latency", "0us")
    done = lab(*options, command=["sh", "-c", train + counted], timeout=100)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert (result["shard"], result["hosts"]) == (2, 2)
    assert 1 <= result["wire_bytes"] / result["dense_bytes"] < 1.2  # ranks compare parameters at the first step
    numbers = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
    assert len(numbers) == 4  # of each rank's host
    for number in numbers:
        assert 1 < number / (2 * result["wire_bytes"]) < 1.2  # headers, and parameters at the beginning
