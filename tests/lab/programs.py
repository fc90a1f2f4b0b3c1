"""What the ranks of the tests run: ``python programs.py NAME ARGUMENTS``; rank 0 prints one JSON object."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path


def hosts(comm):
    from mpi4py import MPI

    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
    row = [
        socket.gethostname(),
        MPI.Get_processor_name(),
        shared.size,
        os.getcwd(),
        os.environ.get("LAB_TEST"),
        sys.executable,
    ]
    return comm.gather(row)


def pingpong(comm, size, repetitions, pause):
    """Seconds of each round trip between ranks 0 and 1 while the other ranks spin in a barrier."""
    import numpy as np

    size, repetitions, pause = int(size), int(repetitions), float(pause)
    data = np.zeros(size, np.uint8)
    seconds = []
    comm.Barrier()
    for _ in range(repetitions + 3):
        if pause and comm.rank < 2:
            time.sleep(pause)
        begin = time.perf_counter()
        if comm.rank == 0:
            comm.Send(data, 1)
            comm.Recv(data, 1)
        elif comm.rank == 1:
            comm.Recv(data, 0)
            comm.Send(data, 0)
        seconds.append(time.perf_counter() - begin)
    comm.Barrier()
    return seconds[3:]


def send(comm, size, repetitions):
    """Send from rank 0 to the last rank; what passed eth0 of each rank's host, as its kernel counts."""
    import numpy as np

    def counted():
        folder = Path("/sys/class/net/eth0/statistics")
        return {name: int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")}

    def counted_in_silence():
        """Count a second after the last message and a second before the next: packets are sent again until then."""
        silence = comm.bcast(time.monotonic())  # one clock for all hosts
        time.sleep(max(0, silence + 1 - time.monotonic()))
        now = counted()
        time.sleep(max(0, silence + 2 - time.monotonic()))
        return now

    data = np.zeros(int(size), np.uint8)
    before = counted_in_silence()
    for _ in range(int(repetitions)):
        if comm.rank == 0:
            comm.Send(data, comm.size - 1)
        elif comm.rank == comm.size - 1:
            comm.Recv(data, 0)
    after = counted_in_silence()
    return comm.gather({name: value - before[name] for name, value in after.items()})


def rates(comm, size, seconds):
    """Lengths of single messages from rank 0 to rank 1, with the time since the start of each."""
    import numpy as np

    data, answer = np.zeros(int(size), np.uint8), np.zeros(1, np.uint8)
    begin, rows = time.perf_counter(), []
    while True:
        answer[0] = time.perf_counter() - begin < float(seconds)
        if not comm.bcast(int(answer[0])):
            return rows
        start = time.perf_counter()
        if comm.rank == 0:
            comm.Send(data, 1)
            comm.Recv(answer, 1)
        elif comm.rank == 1:
            comm.Recv(data, 0)
            comm.Send(answer, 0)
        rows.append((start - begin, time.perf_counter() - start))


def die(comm):
    comm.Barrier()
    if comm.rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


def wait(comm, marker):
    """Say that all ranks run, and wait; `marker` shows in the process list."""
    comm.Barrier()
    if comm.rank == 0:
        print("running", flush=True)
    time.sleep(300)


if __name__ == "__main__":
    from mpi4py import MPI

    value = globals()[sys.argv[1]](MPI.COMM_WORLD, *sys.argv[2:])
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(value), flush=True)
