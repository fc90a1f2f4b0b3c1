"""Program of test_on_hosts.py: reduce arrays; rank 0 prints the bytes that ranks recorded and their hosts counted."""

import json
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpicomp


def main(config, collective, numel, steps):
    reducer = mpicomp.Reducer(json.loads(config), collective)
    rng = np.random.default_rng(MPI.COMM_WORLD.rank)
    pool = [{"w": rng.normal(size=int(numel)).astype(np.float32)} for _ in range(4)]
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


main(*sys.argv[1:])
