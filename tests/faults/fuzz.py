"""Send mutated messages to everything that decodes any: see docs/sharp-bits.md, "Hostile input".

    python tests/faults/fuzz.py [--how whole|compiled] [--decoder GLOB] [--messages N] [--seed K] [--list]

``whole`` calls a decoder as exchanges call it. ``compiled`` repeats its kernels alone, which is many times as fast.
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
from faults.decoders import decoders, exchanges
from faults.fence import Fence, fence_workspaces
from faults.mutations import mutate
from faults.repeated import calls_of, repeat

from mpicomp.errors import MpicompError

_PATIENCE_S = 60  # of processor time without a message that is decoded: then it hangs. Compiling takes a few of them
_MEMORY = 4 << 30  # bytes of address space beyond what is there at first
_SPARE = 64  # bytes by which a message may grow
_PROGRESS_BYTES = 1 << 20  # bytes of the file in which a process tells what it does
_EACH = {"whole": 500, "compiled": 100_000}  # messages of one case
_EMPTY = 20  # cases without elements that may come first; a decoder with more of them has no kernels
_SHOWN = 5  # faults of one decoder that are printed

Said = dict[str, int]


class Progress:
    """What a process is at, in memory that outlives it: decoder, case, message, state of the mutations, and bytes."""

    def __init__(self, path):
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _PROGRESS_BYTES)
        self.numbers = np.frombuffer(self._memory, np.uint64, 8)
        self._bytes = np.frombuffer(self._memory, np.uint8, offset=64)

    @property
    def message(self):
        return self._bytes[: int(self.numbers[4])].tobytes()

    @message.setter
    def message(self, value):
        size = min(value.size, self._bytes.size)
        self._bytes[:size] = value[:size]
        self.numbers[4] = size


def places(fence, size):
    """Return two rooms of at least so many bytes: one that begins at a page nobody may touch, one that ends at it."""
    whole = -(-size // 8) * 8
    return fence.empty(whole, np.uint8, at_end=False), fence.empty(whole, np.uint8, at_end=True)


def laid(rooms, message, turn):
    """Copy a message to the one room or the other, so that it touches the page, as far as it stays aligned."""
    first, last = rooms
    if turn % 2:
        view = first[: message.size]
    else:
        start = (last.size - message.size) // 8 * 8
        view = last[start : start + message.size]
    view[:] = message
    return view


def random_of(name, seed, number):
    """Return the random numbers of a case: others for each decoder, the same in every process."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), number])


class Fuzz:
    """Decodes in this process.

    Parameters
    ----------
    progress : Progress
        Where it says what it does.
    seed : int
        Of all cases and mutations.
    """

    def __init__(self, progress, seed):
        self.progress, self.seed = progress, seed
        self.fence = Fence()
        fence_workspaces(self.fence)

    def case(self, name, make, number):
        rng = random_of(name, self.seed, number)
        made = make(rng, self.fence)
        self.progress.numbers[1] = number
        return made, np.array([rng.integers(2**63)], np.uint64)

    def whole(self, name, make, messages):
        """Yield counts of how messages ended; a fault as its traceback."""
        count, number = 0, 0
        said = Counter()
        while count < messages:
            case, state = self.case(name, make, number)
            pristine = np.frombuffer(case.message, np.uint8)
            scratch = np.empty(pristine.size + _SPARE, np.uint8)
            rooms = places(self.fence, scratch.size)
            for turn in range(min(_EACH["whole"], messages - count)):
                size = mutate(state, pristine, scratch, case.resizes)
                message = laid(rooms, scratch[:size], turn)
                self.progress.numbers[2] = turn
                self.progress.message = message
                try:
                    case.decode(message)
                    said["decoded"] += 1
                except MpicompError:
                    said["refused"] += 1
                except Exception:
                    said["faults"] += 1
                    yield fault(name, self.seed, number, turn, message.tobytes(), traceback.format_exc())
                count += 1
            number += 1
        yield dict(said)

    def compiled(self, name, make, messages):
        """Do so with kernels alone, in a compiled loop."""
        said, number = Counter(), 0
        while said["messages"] < messages:
            case, state = self.case(name, make, number)
            pristine = np.frombuffer(case.message, np.uint8)
            message = laid(places(self.fence, pristine.size), pristine, number)
            parts = [(buffer, calls) for buffer, calls in calls_of(case, message) if calls]
            number += 1
            if not parts:
                if not said and number == _EMPTY:
                    break
                continue
            most = min(_EACH["compiled"], messages - said["messages"])
            for buffer, calls in parts:
                each = -(-most // len(parts))
                self.progress.message = buffer.reshape(-1).view(np.uint8)
                said["decoded"] += repeat(buffer, calls, state, each, self.progress.numbers[3:4])
                said["messages"] += each
                said[" > ".join(function.__name__ for function, *_ in calls)] += each
        said["refused"] = said["messages"] - said["decoded"]
        yield dict(said)


def fault(name, seed, number, turn, message, what):
    """Return the report of a fault."""
    return {"fault": name, "seed": seed, "case": number, "message": turn, "bytes": message.hex(), "what": what}


def child(arguments):
    """Decode in this process; print a line for each decoder that is done and for each fault."""
    faulthandler.enable()
    known = decoders() | exchanges()
    progress = Progress(arguments.progress)
    fuzz = Fuzz(progress, arguments.seed)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    for name in arguments.names:
        progress.numbers[0] = arguments.names.index(name)
        began = time.perf_counter()
        for said in getattr(fuzz, arguments.how)(name, known[name], arguments.messages):
            if "fault" not in said:
                said |= {"decoder": name, "seconds": round(time.perf_counter() - began, 1)}
            print(json.dumps(said), flush=True)


def outcomes(names, how, messages, seed):
    """Have a process decode, and another one go on where it dies; yield what they say, and how they die."""
    left = list(names)
    with tempfile.TemporaryDirectory(prefix="mpicomp-fuzz-") as folder:
        while left:
            path = Path(folder) / "progress"
            path.write_bytes(bytes(_PROGRESS_BYTES))
            progress, given = Progress(path), list(left)
            command = [sys.executable, __file__, "--child", str(path), "--how", how, "--seed", str(seed)]
            command += ["--messages", str(messages), *(f"--name={name}" for name in left)]
            with open(Path(folder) / "errors", "w+b") as errors:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
                yield from _lines(process, progress, left)
                if left:
                    errors.seek(0)
                    trace = errors.read().decode(errors="replace")[-6000:]
                    name = given[int(progress.numbers[0])]
                    case, turn, state = (int(number) for number in progress.numbers[1:4])
                    ended = f"ended with status {process.returncode}\n{trace}"
                    yield fault(name, seed, case, turn, progress.message, ended) | {"state": state, "fatal": True}
                    left.remove(name)


def _lines(process, progress, left):
    """Yield what a process says until it ends; kill it where nothing changes any more."""
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


def fuzz(names, how, messages, seed, output=None):
    """Decode mutated messages; return what each decoder has said, and the faults."""
    done, faults = [], []
    for said in outcomes(names, how, messages, seed):
        if "decoder" in said:
            done.append(said)
        else:
            faults.append(said)
        if output is not None and (
            "decoder" in said or sum(report["fault"] == said["fault"] for report in faults) <= _SHOWN
        ):
            print(_text(said), file=output, flush=True)
    return done, faults


def _text(said):
    if "fault" in said:
        state = f", state {said['state']}" if "state" in said else ""
        where = f"seed {said['seed']}, case {said['case']}, message {said['message']}{state}"
        return f"FAULT in {said['fault']}: {where}\n  {said['bytes'][:2000]}\n{said['what']}"
    kernels = [f"{key} {count:,}" for key, count in said.items() if key.startswith("_")]
    numbers = " ".join(f"{said.get(key, 0):,} {key}" for key in ("decoded", "refused", "faults"))
    return "; ".join([f"{said['decoder']}: {numbers}, {said['seconds']} s", *kernels])


def main():
    """Run what was asked for and return the exit status."""
    parser = argparse.ArgumentParser(description="Send mutated messages to decoders.")
    parser.add_argument("--how", choices=["whole", "compiled"], default="whole")
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
        names = [name for name in known if any(fnmatch.fnmatch(name, item) for item in arguments.decoder)]
    if arguments.list:
        print(*names, sep="\n")
        return 0
    if not names:
        parser.error("no decoder has such a name; see --list")
    done, faults = fuzz(names, arguments.how, arguments.messages, arguments.seed, sys.stdout)
    total = sum(said.get("decoded", 0) + said.get("refused", 0) + said.get("faults", 0) for said in done)
    print(f"{len(done)} decoders, {total:,} messages, {len(faults)} faults; {arguments.how}, seed {arguments.seed}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
