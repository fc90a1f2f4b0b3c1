"""Send mutated messages to everything that decodes any: see docs/sharp-bits.md, "Hostile input".

    python tests/faults/fuzz.py [--decoder GLOB] [--messages N] [--seed K] [--list]

With ``NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=F`` kernels check every index (the folder keeps these kernels from others).
Names are found from the registries; ``exchange/*`` are all whole exchanges that the others do not represent.

Messages and what is decoded begin or end at a page without any right, and a process of its own decodes them. A fault is
printed with what it takes to send the message again: an exception that is no error of mpicomp, a lot of memory, or the
end of the process, which crashed or took too long. The exit status is 1 then.
"""

import argparse
import faulthandler
import fnmatch
import json
import mmap
import random
import resource
import subprocess
import sys
import traceback
import zlib
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from faults.fence import Fence, fence_workspaces
from faults.messages import SPARE, decoders, exchanges, mutate

from mpicomp.errors import MpicompError

_LIMIT_S = 300  # of a decoder's messages between two lines of output: then it hangs
_MEMORY_BYTES = 4 << 30  # of address space beyond what is there at first
_CASE_MESSAGES = 500  # that are made of one genuine message


def decode_mutations(name, make, messages, seed, fence):
    """Yield the report of each fault, and at the end counts of how messages ended."""
    counts = Counter(decoded=0, refused=0, faults=0)
    for count in range(messages):
        number, turn = divmod(count, _CASE_MESSAGES)
        if turn == 0:
            faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
            case = make(np.random.default_rng([seed, zlib.crc32(name.encode()), number]), fence)
            rng = random.Random(f"{name} {seed} {number}")
            size = -(-(len(case.message) + SPARE) // 8) * 8
            rooms = [fence.empty(size, np.uint8, at_end=at_end) for at_end in (True, False)]
        mutated = np.frombuffer(mutate(rng, case.message, case.resizes), np.uint8)
        # At the end of the one or the beginning of the other, as far as it stays aligned.
        start = (size - mutated.size) // 8 * 8 if turn % 2 == 0 else 0
        message = rooms[turn % 2][start : start + mutated.size]
        message[:] = mutated
        try:
            case.decode(message)
            counts["decoded"] += 1
        except MpicompError:
            counts["refused"] += 1
        except Exception:
            counts["faults"] += 1
            yield {"fault": f"{name}, message {count} of seed {seed}", "trace": traceback.format_exc()}
    yield {"decoder": name} | counts


def child(arguments):
    """Decode in this process; print a line where a decoder begins and where it is done, and for each fault."""
    faulthandler.enable()
    fence = Fence()
    fence_workspaces(fence)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
    for name, make in chosen(arguments.decoder).items():
        print(json.dumps({"begins": name}), flush=True)
        for report in decode_mutations(name, make, arguments.messages, arguments.seed, fence):
            print(json.dumps(report), flush=True)


def chosen(patterns):
    """Return the decoders whose names match; all but ``exchange/*`` without a pattern."""
    known = decoders() | (exchanges() if patterns else {})
    return {name: make for name, make in known.items() if any(fnmatch.fnmatch(name, p) for p in patterns or ["*"])}


def fuzz(messages, seed, patterns=(), show=lambda text: None):
    """Have a process decode mutated messages; return the counts of each decoder, and the faults."""
    command = [sys.executable, __file__, "--child", "--seed", str(seed), "--messages", str(messages)]
    command += [word for pattern in patterns for word in ("--decoder", pattern)]
    done, faults, name = [], [], None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            report = json.loads(line)
            name = report.get("begins", name)
            if "decoder" in report:
                done.append(report)
            elif "fault" in report:
                faults.append(report)
            if "begins" not in report:
                show("\n".join(map(str, report.values())) if "fault" in report else line.strip())
    if process.returncode:  # its stack is on stderr
        faults.append({"fault": f"{name}, seed {seed}", "trace": f"ended with status {process.returncode}"})
        show("\n".join(faults[-1].values()))
    return done, faults


def main():
    """Run what was asked for and return the exit status."""
    parser = argparse.ArgumentParser(description="Send mutated messages to decoders.")
    parser.add_argument("--decoder", metavar="GLOB", action="append", default=[], help="only these; not exchange/*")
    parser.add_argument("--messages", type=int, default=100_000, help="for each decoder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the names of all decoders")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.list:
        print(*chosen(arguments.decoder or ["*"]), sep="\n")
        return 0
    if not chosen(arguments.decoder):
        parser.error("no decoder has such a name; see --list")
    if arguments.child:
        return child(arguments)
    done, faults = fuzz(arguments.messages, arguments.seed, arguments.decoder, lambda text: print(text, flush=True))
    total = sum(report["decoded"] + report["refused"] + report["faults"] for report in done)
    print(f"{len(done)} decoders, {total:,} messages, {len(faults)} faults; seed {arguments.seed}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
