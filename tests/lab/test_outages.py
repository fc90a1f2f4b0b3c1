"""Links that go down and come back: the job goes on, with the same bits, and says who is cut off meanwhile."""

import re

import pytest

pytestmark = pytest.mark.timeout(180)

PROGRAM = """
import hashlib, sys, time
import numpy as np
from mpi4py import MPI
import mpicomp

comm = MPI.COMM_WORLD
reducer = mpicomp.Reducer("topk", sys.argv[1], warmup=0)
digest, longest, step, until = hashlib.blake2b(), 0.0, 0, time.time() + 12
comm.Barrier()
while step < 300 or longest < float(sys.argv[2]) and time.time() < until:
    gradient = np.random.default_rng([step, comm.rank]).standard_t(3, 20_000).astype(np.float32)
    begin = time.monotonic()
    mean = reducer.reduce({"w": gradient})["w"]
    longest = max(comm.allgather(max(longest, time.monotonic() - begin)))
    if step < 300:
        digest.update(mean.tobytes())
    step += 1
    time.sleep(0.01)
print(f"bits {comm.rank} {digest.hexdigest()} {longest:.1f}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "down"), [("allgather", "100mbit,0,100mbit"), ("star-topk:ring", "0")])
def test_a_link_that_is_down_for_a_while(lab, tmp_path, collective, down):
    def bits(*options, longest):
        done = lab(
            *["--hosts", "3", *options],
            command=["python", "-c", PROGRAM, collective, str(longest)],
            environment={"MPICOMP_STALL": "1", "MPICOMP_PROBE": "0"},
            timeout=80,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        found = re.findall(r"bits (\d) (\w+) (\S+)", done.stdout)
        assert sorted(rank for rank, _, _ in found) == ["0", "1", "2"]
        [digest] = {digest for _, digest, _ in found}
        return digest, float(found[0][2]), done.stderr

    schedule = tmp_path / "links.txt"
    schedule.write_text(f"0 100mbit 1ms\n7 {down} 1ms\n10 100mbit 1ms\n")
    digest, longest, said = bits("--schedule", str(schedule), longest=2)
    assert longest > 2
    assert re.search(r"rank \d has waited .* rank.* not there \(rank.* not answering: stopped, cut off", said), said
    again, longest, said = bits("--bandwidth", "100mbit", "--latency", "1ms", longest=0)
    assert again == digest
