"""Messages that libFuzzer chooses by what they reach; see `faults.fuzz`.

Kernels are plain Python here (`faults.uncompiled`), so that it sees into them: an index out of bounds is an
`IndexError`. They take a thousand times as long, so arrays are short.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np

_CASES = 8  # genuine messages that are changed; the first byte says which
_SIZES = 1, 24  # elements of an array
_NETWORK = 2, 2  # channels of a learned code: a loop over more of them is the same loop
_LONGEST = 4096  # bytes of a message that is made longer
_FAULTS = 5  # after so many of a decoder it has shown enough
_PATIENCE_S = 600  # on the clock of the wall for one message: others may have the processor


def explore(name, messages, seed, folder):
    """Decode in this process, which libFuzzer takes over; print a line for each fault and one at the end."""
    import atheris

    with atheris.instrument_imports(include=["mpicomp"], enable_loader_override=False):
        import faults.decoders
        from faults.uncompiled import replace_intrinsics

        from mpicomp.errors import MpicompError

    replace_intrinsics()
    from faults.fence import Fence, fence_workspaces
    from faults.fuzz import fault, laid, places, random_of

    fence = Fence()
    fence_workspaces(fence)
    faults.decoders.SIZES, faults.decoders.NETWORK = _SIZES, _NETWORK
    make = (faults.decoders.decoders() | faults.decoders.exchanges())[name]
    cases = [make(random_of(name, seed, number), fence) for number in range(_CASES)]
    longest = max(_LONGEST, *(len(case.message) for case in cases))
    rooms = places(fence, longest)
    for number, case in enumerate(cases):
        (Path(folder) / str(number)).write_bytes(bytes([number]) + case.message)
    said, began = Counter(), time.perf_counter()

    def decode(data):
        if not data:
            return
        number, message = data[0] % _CASES, np.frombuffer(data, np.uint8, offset=1)
        case = cases[number]
        if not case.resizes:  # what is missing is zero
            whole = np.zeros(len(case.message), np.uint8)
            whole[: message.size] = message[: whole.size]
            message = whole
        try:
            case.decode(laid(rooms, message[:longest], said.total()))
            said["decoded"] += 1
        except MpicompError:
            said["refused"] += 1
        except Exception:
            said["faults"] += 1
            print(json.dumps(fault(name, seed, number, 0, message.tobytes(), traceback.format_exc())), flush=True)
        if said.total() == messages or said["faults"] == _FAULTS:
            seconds = round(time.perf_counter() - began, 1)
            print(json.dumps(dict(said) | {"decoder": name, "seconds": seconds}), flush=True)
            os._exit(0)

    atheris.Setup(
        [sys.argv[0], f"-seed={seed + 1}", f"-max_len={longest + 1}", f"-timeout={_PATIENCE_S}", folder], decode
    )
    atheris.Fuzz()


def run_all(names, messages, seed, output):
    """Explore one decoder after the other, each in a process; return what they have said, and the faults."""
    from faults.fuzz import _text, fault

    done, faults = [], []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="mpicomp-fuzz-") as folder:
            command = [sys.executable, str(Path(__file__).with_name("fuzz.py")), "--child", folder, "--how", "coverage"]
            command += ["--name", name, "--messages", str(messages), "--seed", str(seed)]
            ran = subprocess.run(
                command, env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, cwd=folder,
                check=False, errors="replace",
            )  # fmt: skip
            lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
            found = [line for line in lines if "fault" in line]
            ended = [line for line in lines if "decoder" in line]
            if not ended:
                kept = [path.read_bytes() for path in Path(folder).glob("*-*")]  # crash-..., timeout-...
                found.append(fault(name, seed, 0, 0, kept[0] if kept else b"", ran.stderr[-6000:]))
            for line in ended:
                reached = re.findall(r"cov: (\d+)", ran.stderr)
                line["_places"] = int(reached[-1]) if reached else 0
            done, faults = done + ended, faults + found
            for line in found + ended:
                print(_text(line), file=output, flush=True)
    return done, faults
