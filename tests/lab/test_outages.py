"""Links that go down and come back: the job goes on, with the same bits, and says who is cut off meanwhile."""

import re

import pytest

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
import hashlib, sys, time
import numpy as np
from mpi4py import MPI
import mpicomp

comm, collective, steps = MPI.COMM_WORLD, sys.argv[1], int(sys.argv[2])
reducer = mpicomp.Reducer("topk", collective, policy={"warmup": 0})
digest, longest, step, begun = hashlib.blake2b(), 0.0, 0, time.monotonic()
while steps == 0 or step < steps:
    gradient = np.random.default_rng([step, comm.rank]).standard_t(3, 20_000).astype(np.float32)
    begin = time.monotonic()
    digest.update(reducer.reduce({"w": gradient})["w"].tobytes())
    longest = max(longest, time.monotonic() - begin) if step > 2 else 0.0  # the first ones load what is compiled
    step += 1
    time.sleep(0.05)
    # Without a number of steps: until a link has been down, and some more.
    if steps == 0 and comm.bcast(longest > 2 or time.monotonic() - begun > 60):
        steps = step + 20
sys.stdout.write(f"bits {comm.rank} {digest.hexdigest()} {step} {longest:.1f}\\n")
"""
DOWN_S = 3  # from the 20th second on: by then ranks have started, also on a machine that is busy


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "down"), [("allgather", "100mbit,0,100mbit"), ("star-topk:ring", "0")])
def test_link_outage_leaves_the_bits_as_they_are(lab, tmp_path, collective, down):
    def bits(*options, steps):
        done = lab(
            *["--hosts", "3", *options],
            command=["python", "-c", PROGRAM, collective, str(steps)],
            environment={"MPICOMP_STALL": "1"},
            timeout=120,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        found = re.findall(r"bits (\d) (\w+) (\d+) (\S+)", done.stdout)
        assert sorted(row[0] for row in found) == ["0", "1", "2"]
        [(digest, made)] = {(row[1], int(row[2])) for row in found}
        return digest, made, max(float(row[3]) for row in found), done.stderr

    schedule = tmp_path / "links.txt"
    schedule.write_text(f"0 100mbit 1ms\n20 {down} 1ms\n{20 + DOWN_S} 100mbit 1ms\n")
    digest, steps, longest, said = bits("--schedule", str(schedule), steps=0)
    assert longest > 2
    assert re.search(r"rank \d has waited .* rank.* not there \(rank.* not answering: stopped, cut off", said), said
    undisturbed = bits("--bandwidth", "100mbit", "--latency", "1ms", steps=steps)
    assert undisturbed[0] == digest
