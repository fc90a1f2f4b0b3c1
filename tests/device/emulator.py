"""Memory and kernels of a GPU that is none: kernels run in an emulation, on arrays of `device.fake_cuda`.

Memory is handed out full of rubbish, between guards that are looked at after every launch; arguments are held to the
kernel's parameters, which CuPy does not do; inside `no_synchronisation` whatever would wait for a device fails. Every
access of a kernel is watched: it fails where it is not aligned, not in order with another thread's, outside the arrays,
or a read of shared memory that the block has not written.

What is not seen:

- Races between blocks, but for two that write to one place without an atomic change: a block that reads what others
  have not finished yet shows where the random order of the blocks changes the results. A block that has changed any
  global memory atomically is taken to know of all that ran before it.
- Memory ordering: a missing ``__threadfence`` does nothing, as blocks run one after the other.
- Races that change nothing: two threads that write the same value to one place.
- Accesses by ``memcpy`` and ``memset`` of more than a register; those further outside an array than its guards, in
  another array that is passed as well, or of an array that was made by no function of this module.
- Global memory that is read before it is written, but by the rubbish in its results.
- Threads at different calls of the same function with the same arguments, such as two barriers in two branches, which
  meet here and need not there.
- More registers or shared memory than a device has, and how long anything takes.
"""

import contextlib
import ctypes
import hashlib
import itertools
import re
import struct
import subprocess
import tempfile
from pathlib import Path

import numpy as np

COMPILER = "g++"
HEADERS = "".join(Path(__file__).with_name(name).read_text() for name in ("emulator.h", "cuda_functions.h"))
OPTIONS = ["-O1", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique", "-w"]
WATCH = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]  # what it calls is in the emulator
TWICE = ["-ffp-contract=off"]  # a product and a sum are rounded twice, as on x86-64 without further options
# They are rounded once wherever the compiler can, as the compiler of a device does it.
JOINED = ["-ffp-contract=fast", "-fexpensive-optimizations", "-mfma"]

BUILT = Path(__file__).resolve().parents[2] / ".pytest_cache" / "emulated"  # kept from run to run, as Numba's are
launches: list[str] = []
seeds = itertools.count(1)
UNORDERED = {"sparse_add", "sparse_add_fp16", "sparse_add_bf16"}
"""Kernels whose threads add to one element where indices repeat: that they report, and nobody uses the sums."""

_GUARD = 512
_RUBBISH = 0xC9
_quiet = False
_flushing = False


@contextlib.contextmanager
def no_synchronisation():
    """Fail where the host would wait for the device."""
    global _quiet
    _quiet = True
    try:
        yield
    finally:
        _quiet = False


@contextlib.contextmanager
def flushing():
    """Let kernels read and write subnormal numbers as zero, as CuPy has float32 treated, whatever it is asked for."""
    global _flushing
    _flushing = True
    try:
        yield
    finally:
        _flushing = False


def synchronise():
    """Fail inside `no_synchronisation`."""
    if _quiet:
        raise RuntimeError("the host waits for the device")


def room(nbytes):
    """Return memory of the device, not cleared."""
    return np.empty(nbytes, np.uint8)


class Memory:
    """Memory full of rubbish, between guards."""

    def __init__(self, size):
        self.whole = room(size + 2 * _GUARD + 512)
        self.whole.fill(_RUBBISH)
        start = _GUARD + -(self.whole.ctypes.data + _GUARD) % 512  # aligned as CuPy's allocator does it
        self.inside = self.whole[start : start + size]
        self._before, self._behind = self.whole[:start], self.whole[start + size :]

    def check(self):
        for guard in (self._before, self._behind):
            if (guard != _RUBBISH).any():
                raise RuntimeError("a kernel wrote outside an array")


def _kernels(code):
    """Find the names of a source's kernels; where a macro makes them, they are what it is given first."""
    code = code.replace("\\\n", " ")
    names = re.findall(r"\bKERNEL(?:_OF\(\d\))?\s+(\w+)\(", code)
    for macro in re.findall(r"#define (\w+)\(NAME\b", code):
        names += re.findall(rf"^{macro}\((\w+)", code, re.MULTILINE)
    return sorted(set(names) - {"NAME"})


def _build(command, text, library):
    """Compile in a folder that no other process has, so that a library is there whole or not at all."""
    BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        source, compiled, linked = (Path(folder) / name for name in ("kernels.cpp", "kernels.o", library.name))
        source.write_text(text)
        # In two steps: what would look for races by itself is not linked.
        for step in ([*command, "-c", source, "-o", compiled], [COMPILER, "-shared", compiled, "-o", linked]):
            built = subprocess.run(step, capture_output=True, text=True, timeout=100, check=False)
            assert built.returncode == 0, built.stderr
        linked.replace(library)


class RawModule:
    """A source's kernels; products and sums are rounded once with ``joins``, wherever the compiler can."""

    def __init__(self, code, options=(), joins=False):
        rounding = JOINED if joins else TWICE
        names = _kernels(code)
        text = f"{HEADERS}\n{code}\n"
        for name in names:
            text += f'extern "C" const char* signature_{name}() {{ return emulator::signature(&{name}); }}\n'
            text += (
                f'extern "C" const char* run_{name}(const uint64_t* words, unsigned blocks, unsigned threads, '
                "uint64_t seed, int flushing, const uint64_t* spans, unsigned count, int unordered) { "
                f"return emulator::run(&{name}, words, blocks, threads, seed, flushing, spans, count, unordered); }}\n"
            )
        command = [COMPILER, *options, *OPTIONS, *WATCH, *rounding]
        library = BUILT / f"{hashlib.sha256(f'{command}{text}'.encode()).hexdigest()[:16]}.so"
        if not library.exists():
            _build(command, text, library)
        self._library = ctypes.CDLL(str(library))

    def get_function(self, name):
        return _Kernel(self._library, name)


def _span(array):
    gaps = 0 if array.flags.c_contiguous else (len(array) - 1) * (array.strides[0] - array.strides[1] * array.shape[1])
    return array.ctypes.data, array.ctypes.data + array.nbytes + gaps


class _Kernel:
    def __init__(self, library, name):
        self.name = name
        read_signature = getattr(library, f"signature_{name}")
        read_signature.restype = ctypes.c_char_p
        self._signature = read_signature().decode()
        self._run = getattr(library, f"run_{name}")
        self._run.restype = ctypes.c_char_p

    def __call__(self, grid, block, arguments):
        assert len(grid) == len(block) == 1
        assert 0 < grid[0] < 2**31
        assert len(arguments) == len(self._signature), f"{self.name} has parameters {self._signature}"
        words, memories, spans = [], [], []
        for place, (letter, argument) in enumerate(zip(self._signature, arguments, strict=True)):
            where = f"{self.name}, argument {place}"
            if hasattr(argument, "_host"):
                assert letter == "p", f"{where}: an array for {letter}"
                has_gaps = argument._host.ndim == 2 and argument._host.strides[1] == argument.itemsize
                assert argument._host.flags.c_contiguous or has_gaps, f"{where}: not contiguous"
                words.append(argument.data.ptr)
                memories.append(argument._memory or Memory(0))
                spans += [*_span(argument._host), *_span(memories[-1].whole)]
            elif isinstance(argument, float):
                assert letter == "d", f"{where}: a double for {letter}"
                words.append(struct.unpack("Q", struct.pack("d", argument))[0])
            else:
                assert type(argument) is int, f"{where}: {type(argument)}"
                assert letter == "i" or (letter == "p" and argument == 0), f"{where}: an integer for {letter}"
                words.append(argument % 2**64)
        launches.append(self.name)
        seed = next(seeds) * 0x9E3779B97F4A7C15 % 2**64
        given = (ctypes.c_uint64 * len(words))(*words)
        ends = (ctypes.c_uint64 * len(spans))(*spans)
        error = self._run(
            given, grid[0], block[0], ctypes.c_uint64(seed), _flushing, ends, len(spans) // 4, self.name in UNORDERED
        )
        if error:
            raise RuntimeError(f"{self.name}: {error.decode()}")
        for memory in memories:
            memory.check()
