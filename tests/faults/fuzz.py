"""Send mutated messages to everything that decodes any: see docs/sharp-bits.md, "Hostile input".

    python tests/faults/fuzz.py [--decoder GLOB] [--messages N] [--seed K] [--list]

With ``NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=F`` kernels check every index (the folder keeps these kernels from others).
Names are found from the registries; ``exchange/*`` are whole exchanges as one rank sees them.

Messages and what is decoded begin or end at a page that nobody may touch, and a process of its own decodes them: where
it dies, hangs, raises what is no error of mpicomp, or asks for a lot of memory, the message is printed, with what it
takes to send it again. The exit status is 1 then.
"""

import argparse
import faulthandler
import fnmatch
import json
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "studies"))  # decoders of their files

import numpy as np
from faults.fence import Fence, fence_workspaces
from faults.messages import SPARE, decoders, exchanges, mutate

from mpicomp.errors import MpicompError

_PATIENCE_S = 60  # of processor time without a message that is decoded: then it hangs. Compiling takes a few of them
_MEMORY_BYTES = 4 << 30  # of address space beyond what is there at first
_PROGRESS_BYTES = 1 << 20  # of the file in which a process notes what it does
_CASE_MESSAGES = 500  # that are made of one genuine message
_SHOWN = 5  # faults of one decoder that are printed


class Progress:
    """What a process is at, in memory that outlives it: numbers of decoder, case and message, and the message."""

    def __init__(self, path):
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _PROGRESS_BYTES)
        self.numbers = np.frombuffer(self._memory, np.uint64, 4)
        self._bytes = np.frombuffer(self._memory, np.uint8, offset=32)

    @property
    def message(self):
        return self._bytes[: int(self.numbers[3])].tobytes()

    @message.setter
    def message(self, value):
        size = min(value.size, self._bytes.size)
        self._bytes[:size] = value[:size]
        self.numbers[3] = size


def decode_mutations(name, make, messages, seed, fence, progress):
    """Yield each fault, and at the end counts of how messages ended."""
    said = Counter()
    for count in range(messages):
        number, turn = divmod(count, _CASE_MESSAGES)
        if turn == 0:
            case = make(np.random.default_rng([seed, zlib.crc32(name.encode()), number]), fence)
            rng = random.Random(f"{name} {seed} {number}")
            size = -(-(len(case.message) + SPARE) // 8) * 8
            rooms = [fence.empty(size, np.uint8, at_end=at_end) for at_end in (True, False)]
        mutated = np.frombuffer(mutate(rng, case.message, case.resizes), np.uint8)
        # At the end of the one or the beginning of the other, as far as it stays aligned.
        start = (size - mutated.size) // 8 * 8 if turn % 2 == 0 else 0
        message = rooms[turn % 2][start : start + mutated.size]
        message[:] = mutated
        progress.numbers[1:3] = number, turn
        progress.message = message
        try:
            case.decode(message)
            said["decoded"] += 1
        except MpicompError:
            said["refused"] += 1
        except Exception:
            said["faults"] += 1
            yield fault(name, seed, number, turn, message.tobytes(), traceback.format_exc())
    yield dict(said)


def fault(name, seed, number, turn, message, what):
    """Return the report of a fault."""
    return {"fault": name, "seed": seed, "case": number, "message": turn, "bytes": message.hex(), "what": what}


def child(arguments):
    """Decode in this process; print a line for each decoder that is done and for each fault."""
    faulthandler.enable()
    known, fence, progress = decoders() | exchanges(), Fence(), Progress(arguments.progress)
    fence_workspaces(fence)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
    for place, name in enumerate(arguments.names):
        progress.numbers[0] = place
        began = time.perf_counter()
        for said in decode_mutations(name, known[name], arguments.messages, arguments.seed, fence, progress):
            if "fault" not in said:
                said |= {"decoder": name, "seconds": round(time.perf_counter() - began, 1)}
            print(json.dumps(said), flush=True)


def outcomes(names, messages, seed):
    """Have a process decode, and another one go on where it dies; yield their reports, and how they die."""
    left = list(names)
    with tempfile.TemporaryDirectory(prefix="mpicomp-fuzz-") as folder:
        while left:
            path = Path(folder) / "progress"
            path.write_bytes(bytes(_PROGRESS_BYTES))
            progress, begun = Progress(path), list(left)
            command = [sys.executable, __file__, "--child", str(path), "--seed", str(seed)]
            command += ["--messages", str(messages), *(f"--name={name}" for name in left)]
            with open(Path(folder) / "errors", "w+b") as errors:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
                yield from _lines(process, progress, left)
                if left:
                    errors.seek(0)
                    trace = errors.read().decode(errors="replace")[-6000:]
                    place, case, turn = (int(number) for number in progress.numbers[:3])
                    ended = f"ended with status {process.returncode}\n{trace}"
                    yield fault(begun[place], seed, case, turn, progress.message, ended)
                    left.remove(begun[place])


def _lines(process, progress, left):
    """Yield a process's reports until it ends; kill it where nothing changes any more."""
    os.set_blocking(process.stdout.fileno(), False)
    text, before, since = b"", None, 0.0
    try:
        while True:
            ended = process.poll() is not None
            text += process.stdout.read() or b""
            *whole, text = text.split(b"\n")
            for line in whole:
                said = json.loads(line)
                if "decoder" in said:
                    left.remove(said["decoder"])
                yield said
            if ended:
                return
            now = progress.numbers.tobytes()
            if now != before:
                before, since = now, _used_s(process)
            elif _used_s(process) - since > _PATIENCE_S:
                process.send_signal(signal.SIGABRT)  # with its stack
                process.wait()
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


def _used_s(process):
    """Return the seconds that a process has had a processor: on a busy machine others have it."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fuzz(names, messages, seed, output=None):
    """Decode mutated messages; return the counts of each decoder, and the faults."""
    done, faults = [], []
    for said in outcomes(names, messages, seed):
        (done if "decoder" in said else faults).append(said)
        if output is not None and ("decoder" in said or _count(faults, said["fault"]) <= _SHOWN):
            print(_text(said), file=output, flush=True)
    return done, faults


def _count(faults, name):
    return sum(report["fault"] == name for report in faults)


def _text(said):
    if "fault" in said:
        where = f"seed {said['seed']}, case {said['case']}, message {said['message']}"
        return f"FAULT in {said['fault']}: {where}\n  {said['bytes'][:2000]}\n{said['what']}"
    numbers = " ".join(f"{said.get(key, 0):,} {key}" for key in ("decoded", "refused", "faults"))
    return f"{said['decoder']}: {numbers}, {said['seconds']} s"


def main():
    """Run what was asked for and return the exit status."""
    parser = argparse.ArgumentParser(description="Send mutated messages to decoders.")
    parser.add_argument(
        "--decoder", metavar="GLOB", action="append", help="only these; all but exchange/* if not given"
    )
    parser.add_argument("--messages", type=int, default=100_000, help="for each decoder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the names of all decoders")
    parser.add_argument("--child", dest="progress", help=argparse.SUPPRESS)
    parser.add_argument("--name", dest="names", action="append", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.progress:
        return child(arguments)
    known = decoders() | exchanges()
    names = list(known) if arguments.list else list(decoders())
    if arguments.decoder:
        names = [name for name in known if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.decoder)]
    if arguments.list:
        print(*names, sep="\n")
        return 0
    if not names:
        parser.error("no decoder has such a name; see --list")
    done, faults = fuzz(names, arguments.messages, arguments.seed, sys.stdout)
    total = sum(said.get("decoded", 0) + said.get("refused", 0) + said.get("faults", 0) for said in done)
    print(f"{len(done)} decoders, {total:,} messages, {len(faults)} faults; seed {arguments.seed}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
