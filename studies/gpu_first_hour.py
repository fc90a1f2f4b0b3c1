"""All checks that need a GPU, in ten minutes: ``python studies/gpu_first_hour.py``, once there is one.

They are the tests of tests/device/test_first_hour.py, each in a process of its own with a time limit, so that one that
crashes or hangs takes no other with it; and those of all kernels.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpicomp.bench.devices import device_name
from mpicomp.bench.measure import results

from mpicomp.cli import run_program
from mpicomp.cli.options import check_writable
from mpicomp.errors import ConfigurationError

_STUDY = "gpu_first_hour"
_ROOT = Path(__file__).resolve().parents[1]
_FILE = "tests/device/test_first_hour.py"
_TOTAL_S = 600.0  # seconds for all checks
_MAX_EXIT_S = 5.0  # seconds that a process has to end after SIGTERM
NO_GPU = 3
"""Exit status where there is no GPU, or no CuPy to use it with."""
_FINDING_STATUS = 99  # exit status of compute-sanitizer after a finding
_FAULT = """
import cupy, numpy
cupy.cuda.set_allocator(None)
module = cupy.RawModule(code='extern "C" __global__ void f(float* array) { array[threadIdx.x * 4096] = 1; }')
module.get_function("f")((1,), (32,), (cupy.zeros(64, numpy.float32),))
cupy.cuda.Device().synchronize()
"""
Line = tuple[str, str, str, bool | None]
"""The check, the expected and the measured value, and whether it passed; None where nothing was judged."""


@dataclass(frozen=True)
class Check:
    """Tests by a part of their names; ``emulated`` where they mean something without a GPU."""

    title: str
    tests: str
    limit_s: float
    emulated: bool = False
    ranks: int = 1
    tool: str = ""  # of compute-sanitizer


CHECKS = [  # the most important ones first, in case the time runs out
    Check("doctor", "doctor", 90),
    Check("bits", "bits", 90, emulated=True),
    Check("bytes over the bus", "bytes", 60, emulated=True),
    Check("two ranks on one GPU", "path", 150, emulated=True, ranks=2),
    Check("kernels", "kernels", 120),
    Check("a step, its memory and its calls", "numbers", 150, emulated=True, ranks=2),
    Check("text-gpt", "text_gpt", 90),
    Check("torch: side stream", "streams", 60),
    Check("torch: overlap", "overlap", 90, emulated=True, ranks=2),
    Check("direct route", "routes", 60, ranks=2),
    Check("pinned copies", "pinned", 60),
    Check("2,147,483,653 elements", "large", 60, emulated=True),
    *(
        Check(f"compute-sanitizer: {tool}", "short", 60, tool=tool)
        for tool in ("memcheck", "racecheck", "initcheck", "synccheck")
    ),
    Check("compute-sanitizer: a planted fault", "", 60, tool="memcheck"),
    Check("tests/kernels", "", 240, emulated=True),
]


def _lines(check: Check, arguments: argparse.Namespace, scratch: Path, limit_s: float) -> list[Line]:
    kind = "not cuda" if arguments.emulated else "not emulated"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if check.tests:
        words += [_FILE, "-k", f"test_{check.tests} and {kind}"]
    else:
        words += ["tests/kernels/test_pieces.py" if arguments.emulated or arguments.quick else "tests/kernels"]
        words += ["-k", "emulated" if arguments.emulated else "cuda"]
        several = importlib.util.find_spec("xdist") is not None and not (arguments.emulated or arguments.quick)
        words += ["-n", "8"] if several else []
    if check.ranks > 1:
        mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        if mpiexec is None:
            return [(check.title, "", "needs mpiexec", None)]
        words = [mpiexec, "-n", str(check.ranks), *words]
    if check.tool:
        homes = [f"{os.environ[name]}/bin" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
        path = os.pathsep.join([os.environ.get("PATH", ""), *homes, "/usr/local/cuda/bin"])
        sanitizer = shutil.which("compute-sanitizer", path=path)
        if sanitizer is None:
            return [(check.title, "", "not installed", None)]
        words = words if check.tests else [sys.executable, "-c", _FAULT]
        words = [sanitizer, "--tool", check.tool, "--error-exitcode", str(_FINDING_STATUS), *words]
    file = scratch / "lines"
    settings = {"FIRST_HOUR": "quick" if arguments.quick else "", "FIRST_HOUR_LINES": str(file)}
    status, output = run_limited(words, settings, limit_s)
    if status is None:
        return [(check.title, "", f"no end after {limit_s:.0f} s", False)]
    if check.tool:
        summary = [line.strip("= ") for line in output.splitlines() if "SUMMARY" in line] or [last(output)]
        expected = 0 if check.tests else _FINDING_STATUS
        wanted = "no error" if check.tests else "found"
        return [(check.title, wanted, f"{summary[-1]} (status {status})", status == expected)]
    if not check.tests:
        return [(check.title, "all pass", last(output).strip("= "), status == 0 and " passed" in last(output))]
    written = file.read_text().splitlines() if file.exists() else []
    lines: list[Line] = [
        (name, expected, measured, holds) for name, expected, measured, holds in map(json.loads, written)
    ]
    if status not in (0, 5) and all(holds is not False for *_, holds in lines):
        how = f"status {status}" if status >= 0 else f"ended by {signal.Signals(-status).name}"
        errors = [line for line in output.splitlines() if re.match(r"E +[\w.]*(Error|Exception|Interrupt)\b", line)]
        lines.append((check.title, "", f"{how}: {(errors or [last(output)])[-1][:100]}", False))
    return lines or [(check.title, "", last(output).strip("= "), None)]


def run_limited(words: Sequence[str], settings: dict[str, str], limit_s: float) -> tuple[int | None, str]:
    """Run a command in a group of its own; return its status, None where the time was over, and its output."""
    more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            words, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | more | settings,
        )  # fmt: skip
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(limit_s)
        if status is None:
            process.terminate()  # a launcher then ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_MAX_EXIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        return status, log.read()


def last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"studies/{_STUDY}.py", description="make all checks that need a GPU")
    parser.add_argument("--quick", action="store_true", help="short arrays: no time is judged")
    parser.add_argument(
        "--emulated", action="store_true", help="without a GPU: the checks that make sense on the emulator"
    )
    parser.add_argument("--json", metavar="F", help="write the lines to F as one JSON object")
    parser.set_defaults(alone=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Make the checks, print the table, and return the exit status."""
    if arguments.json is not None:
        check_writable(_STUDY, arguments.json)
    begin, device, lines = time.monotonic(), "a stand-in", list[Line]()
    if not arguments.emulated:
        try:
            device = device_name("gpu_first_hour")
        except ConfigurationError as error:
            print(f"{error}; --emulated tries this script without a GPU", flush=True)
            return NO_GPU
    print(f"{_STUDY}: {device}", flush=True)
    for check in CHECKS:
        left_s = _TOTAL_S - (time.monotonic() - begin)
        if arguments.emulated and not check.emulated:
            lines.append((check.title, "", "needs a GPU", None))
        elif left_s < 1:
            lines.append((check.title, "", f"not begun: {_TOTAL_S:.0f} s are over", False))
        else:
            start = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="mpicomp-study-", ignore_cleanup_errors=True) as folder:
                lines += _lines(check, arguments, Path(folder), min(check.limit_s, left_s))
            print(f"{_STUDY}: {check.title}, {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    rows = [dict(zip(("check", "expected", "measured", "holds"), line, strict=True)) for line in lines]
    words = {True: "yes", False: "no", None: "-"}
    shown = [row | {"holds": words[holds]} for row, (*_, holds) in zip(rows, lines, strict=True)]
    results.show(shown, dict.fromkeys(("check", "expected", "measured", "holds"), ""))
    counts = [sum(holds is one for *_, holds in lines) for one in (True, False, None)]
    seconds = time.monotonic() - begin
    print(f"{_STUDY}: {counts[0]} hold, {counts[1]} do not, {counts[2]} were not judged; {seconds:.0f} s", flush=True)
    if arguments.json is not None:
        results.write(arguments.json, rows, 1, device)
    return 1 if counts[1] else 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
