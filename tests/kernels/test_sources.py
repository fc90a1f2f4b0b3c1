"""The sources compile for real devices, need no stack, and can be launched by nothing that does not fit.

Compiling is all that these tests do with CUDA: nothing here runs on a GPU.
"""

import importlib.util
import inspect
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from marks import slow
from mpicomp.kernels import cpu, gpu
from mpicomp.kernels.cpu.message import NONFINITE
from mpicomp.kernels.gpu.compile import THREADS, code_of
from mpicomp.kernels.gpu.scatter import KINDS as KINDS_OF_PIECES
from mpicomp.kernels.gpu.select import DIGIT, Condition, Field, Rule, Source
from mpicomp.kernels.gpu.sidco import CORRECTIONS, LIMIT, SAMPLE, SLACK, SMALL, sampled_of
from mpicomp.kernels.gpu.workspace import Fit, Word

from mpicomp.compressors import sidco as rule
from mpicomp.compressors import thresholds

FOLDER = Path(gpu.__file__).parent
KINDS = {"select", "sidco"}  # those with most registers: a selection, and an estimate
HOST_ONLY = {
    "accumulate_candidates", "ascending_parts", "conv_double", "conv_halve", "conv_mix", "conv_room", "count_reaching",
    "intersect", "mean_of_pairs", "merge_add", "merge_subtract", "norm_change", "select_candidates", "select_listed",
    "split_largest", "write_pairs_plain",
}  # fmt: skip
SOURCES = sorted(path.stem for path in FOLDER.glob("*.cu"))
PREFERRED = ["sm_80", "sm_90"]


@pytest.fixture(scope="module")
def architectures(request):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc to compile with")
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, timeout=60, check=True)
    known = [name for name in PREFERRED if name in listed.stdout.split()]
    if not known:
        pytest.skip(f"nvcc knows none of {', '.join(PREFERRED)}")
    return nvcc, known if request.config.getoption("--slow") else known[-1:]


@pytest.mark.parametrize("real", ["float", slow("double")])
@pytest.mark.parametrize("source", [name if name in KINDS else slow(name) for name in SOURCES])
def test_every_source_compiles_without_a_spilled_register(architectures, source, real, tmp_path):
    nvcc, known = architectures
    text = code_of(source)
    assert "#include" not in text, "NVRTC, which CuPy compiles with, has no headers"
    (tmp_path / "source.cu").write_text(text)
    targets = [f"-gencode=arch=compute_{name[3:]},code={name}" for name in known]
    command = [nvcc, *targets, "-std=c++17", f"-DREAL={real}", "-Xptxas", "-v", "-Werror", "all-warnings"]
    command += ["-fatbin", "-o", str(tmp_path / "source.fatbin"), str(tmp_path / "source.cu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    kernels = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", done.stderr)
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", done.stderr)]
    assert len(kernels) == len(registers) > 0
    for (kernel, architecture), number in zip(kernels, registers, strict=True):
        print(f"{source} {real} {architecture} {kernel}: {number} registers")
        assert number <= 128, f"{kernel}: fewer than two blocks of 256 threads on a multiprocessor"
    assert set(re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", done.stderr)) == {"0"}


@pytest.mark.slow
def test_cupys_compiler_takes_every_source():
    """NVRTC needs no GPU: `pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12`, with its folder in LD_LIBRARY_PATH."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("no CuPy")
    code = "import sys; from cupy.cuda.compiler import _NVRTCProgram as Program; "
    code += "Program(sys.stdin.read(), 'k.cu', (), (), method='cubin').compile(sys.argv[1:], None)"
    options = ["-std=c++17", "-DREAL=float", "-arch=sm_90", "-ftz=true", "--device-as-default-execution-space"]
    for source in SOURCES:
        command = [sys.executable, "-c", code, *options]
        done = subprocess.run(command, input=code_of(source), capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, f"{source}: {done.stderr[-2000:]}"


@pytest.mark.parametrize("real", ["float", slow("double")])
@pytest.mark.parametrize(
    "source",
    [
        *("grid", slow("message"), "scatter", slow("signs")),
        slow("quadratic_levels"),
    ],
)
def test_what_ranks_decode_is_rounded_after_every_product(architectures, source, real, tmp_path):
    """A mean must have the same bits on ranks whose processors cannot multiply and add in one go."""
    nvcc, _ = architectures
    (tmp_path / "source.cu").write_text(code_of(source))
    command = [nvcc, "-arch=compute_80", "-std=c++17", f"-DREAL={real}", "-ptx"]
    command += ["-o", str(tmp_path / "source.ptx"), str(tmp_path / "source.cu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    entries = (tmp_path / "source.ptx").read_text().split(".entry ")[1:]
    decoding = "unpack", "encode", "decode", "scatter", "sparse"
    decoders = [entry for entry in entries if entry.startswith(decoding)]
    assert decoders
    for entry in decoders:
        name = entry.partition("(")[0]
        assert "fma." not in entry, f"{name} multiplies and adds in one go"
        # The assembler may join what does not say how it rounds.
        assert not re.search(r"\bmul\.f", entry) or not re.search(r"\badd\.f", entry), f"{name} leaves it open"


def test_what_kernels_name_is_what_the_host_names():
    """The host knows fields of device structures by their place, and sizes of tiles by their value."""
    common = select = code_of("select")
    fields = re.search(r"struct State \{(.*?)\};", common, re.DOTALL).group(1)
    assert [name.upper() for name in re.findall(r"u64 (\w+);", fields)] == [field.name for field in Field]
    found = re.search(r"struct Partials \{(.*?)\};", common, re.DOTALL).group(1)
    assert [*(name.upper() for name in re.findall(r"u64 (\w+);", found)), "TOTALS"] == [word.name for word in Word]
    estimate = (FOLDER / "sidco.cu").read_text()
    fields = re.search(r"struct Fit \{(.*?)\};", estimate, re.DOTALL).group(1)
    names = re.findall(r"(?:double|u64|i64) ([\w, ]+);", fields)
    assert ", ".join(names).upper().split(", ") == [field.name for field in Fit]
    for enum in (Source, Rule, Condition):
        body = re.search(rf"enum {enum.__name__} \{{ (.*?) \}}", select).group(1)
        assert body.split(", ") == [f"{member.name} = {member.value}" for member in enum]
    assert f"constexpr int THREADS = {THREADS};" in common
    spectrum = (FOLDER / "spectrum.cu").read_text()
    assert f"constexpr int BINS = {cpu.BINS};" in spectrum
    assert f"constexpr int SEEN = {cpu.GROUP};" in spectrum
    assert "enum Stored { AS_OUT = 0, FP16 = 1, BF16 = 2 };" in common
    assert f"constexpr int DIGIT = {DIGIT};" in common
    assert KINDS_OF_PIECES == {"fp16": 1, "bf16": 2}
    assert NONFINITE == 1 << 8
    assert "constexpr u64 NONFINITE = 1ull << 8;" in code_of("message")


def test_numbers_of_the_estimate_are_those_of_the_compressor():
    text = (FOLDER / "sidco.cu").read_text()
    there = dict(re.findall(r"constexpr (?:double|i64) (\w+) = ([\d.e-]+);", text))
    assert (float(there["FIRST"]), float(there["FEW"])) == (rule._FIRST_SHARE, rule._MIN_SURVIVORS)
    assert (float(there["NEAR"]), int(there["CORRECTIONS"])) == (rule._MAX_MISS / 2, rule._MAX_CORRECTIONS)
    assert (CORRECTIONS, SMALL, SAMPLE) == (rule._MAX_CORRECTIONS, rule._MIN_NUMEL, rule._SAMPLE_NUMEL)
    assert (LIMIT, SLACK) == (thresholds._MAX_FACTOR, thresholds._SLACK)
    for stride, numel in itertools.product((1, 2, 3), (1, 1024, 5000, 123_456)):
        assert sampled_of(numel, stride) == rule._seen(numel, stride)


def test_importing_it_needs_no_cupy():
    code = "import sys; from mpicomp.kernels import gpu; print('cupy' in sys.modules, len(gpu.__all__) > 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_without_cupy_it_says_so(monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(ImportError, match="works on CuPy arrays"):
        gpu.Workspace(10, 10, "float32")


def test_names_are_those_of_the_cpu():
    """What a device has beyond them are whole compressions, their results and scratch, and what saves copies."""
    assert set(cpu.__all__) - set(gpu.__all__) == HOST_ONLY
    assert set(gpu.__all__) - set(cpu.__all__) == {
        "Estimate",
        "Message",
        "Output",
        "Stats",
        "Workspace",
        "accumulate_signs",
        "compile_ahead",
        "sidco",
        "sparse_add_and_subtract",
        "table_of",
        "topk",
    }


@pytest.mark.parametrize("name", sorted(set(cpu.__all__) - HOST_ONLY))
def test_parameters_are_those_of_the_cpu(name):
    host, there = getattr(cpu, name), getattr(gpu, name)
    if isinstance(host, int):
        assert there == host
        return
    ours, theirs = inspect.signature(host).parameters, inspect.signature(there).parameters
    assert list(theirs) == list(ours)
    assert [entry.default for entry in theirs.values()] == [entry.default for entry in ours.values()]
    assert [entry.kind for entry in theirs.values()] == [entry.kind for entry in ours.values()]
    if inspect.isclass(host):
        assert set(dir(host)) <= set(dir(there))
