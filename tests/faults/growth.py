"""What a process holds, and whether it grows."""

import ctypes
import gc
import os
import statistics
import threading
from pathlib import Path

from mpi4py import MPI

from mpicomp.mpi.pool import pools


class CommunicatorCount:
    """Counts communicators by an attribute that MPI copies when it duplicates one and deletes when it frees one."""

    def __init__(self):
        self.made = self.freed = 0
        self._key = MPI.Comm.Create_keyval(self._copy, self._delete)
        self.watch(MPI.COMM_WORLD)

    def watch(self, comm):
        self.made += 1
        comm.Set_attr(self._key, True)

    def _copy(self, *_):
        self.made += 1
        return True

    def _delete(self, *_):
        self.freed += 1


def held_by_process(opened):
    """Return what this process holds, by name; memory that is free goes back to the system first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    known = [channels for pool in pools.values() for channels in pool._sets.values()]
    return {
        "rss_kib": int(status["VmRSS"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "communicators": opened.made - opened.freed - len(pools) - len(known),  # without those that pools keep
        "sets_in_use": sum(not channels.free for channels in known),
        "rounds_under_way": sum(not channels.progress() for channels in known),
    }


def verdict(seen):
    """Return the growth of a rank's memory, and the names of what else has grown.

    Memory is the median of the last tenth of steps over that of the first. Of all else the minimum of the last quarter
    is compared with that of the first, so that what comes and goes does not count.
    """
    if len(seen) < 2:
        return None, []
    first, last = seen[0][0], seen[-1][0]
    tenth = (last - first) / 10
    early = [item["rss_kib"] for done, item in seen if done <= first + tenth]
    late = [item["rss_kib"] for done, item in seen if done >= last - tenth]
    quarter = max(1, len(seen) // 4)
    held_before, held_after = ([item for _, item in part] for part in (seen[:quarter], seen[-quarter:]))
    names = [name for name in seen[0][1] if name != "rss_kib"]
    grown = [name for name in names if min(o[name] for o in held_after) > min(o[name] for o in held_before)]
    return statistics.median(late) / statistics.median(early) - 1, grown
