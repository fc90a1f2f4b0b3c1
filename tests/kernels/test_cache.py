"""Compiled functions on disk: files that are missing, damaged, not to be written to, or another user's."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile

import numba
import numpy as np
import pytest
from mpicomp.kernels import cache
from mpicomp.kernels.cpu.compile import exact, kernel


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Put all folders below this test's, and forget what was found before."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    numba.config.reload_config()  # Numba looks at the environment again only when it compiles
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    _forget()
    yield tmp_path
    _forget()
    sys.modules.pop("doubling", None)


def _forget():
    cache.folder.cache_clear()
    cache.local_folder.cache_clear()
    cache._fingerprint.cache_clear()


def run(folder, number=21):
    """Call a function as a process that has just started has it, and return whether it was loaded or compiled."""
    path = folder / "doubling.py"
    path.write_text("def twice(number):\n    return number + number\n")
    spec = importlib.util.spec_from_file_location("doubling", path)
    sys.modules["doubling"] = module = importlib.util.module_from_spec(spec)  # Numba imports it when it loads code
    spec.loader.exec_module(module)
    function = cache.cached(numba.njit(module.twice))
    assert function(number) == 2 * number
    hits, misses = (sum(counts.values()) for counts in (function.stats.cache_hits, function.stats.cache_misses))
    assert hits + misses == 1
    return "loaded" if hits else "compiled"


def files(folder, pattern="*.nb?"):
    return sorted(folder.rglob(pattern))


def test_what_one_process_compiles_the_next_one_loads(tmp_path):
    before = numba.config.CACHE_DIR
    assert [run(tmp_path), run(tmp_path), run(tmp_path, 1.5)] == ["compiled", "loaded", "compiled"]
    assert [run(tmp_path), run(tmp_path, 1.5)] == ["loaded", "loaded"]
    assert files(tmp_path / "tmp") == files(tmp_path)
    assert before == numba.config.CACHE_DIR


@pytest.mark.parametrize("variable", ["NUMBA_CACHE_DIR", "XDG_CACHE_HOME"])
def test_hosts_that_share_the_folder_of_the_user_share_no_file(tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, str(tmp_path / "shared" / "folder"))
    for host in ("n1", "n2"):
        monkeypatch.setattr(cache.socket, "gethostname", lambda host=host: host)
        _forget()
        assert run(tmp_path) == "compiled"
    assert run(tmp_path) == "loaded"
    assert files(tmp_path / "shared") == files(tmp_path)


def test_hosts_that_share_a_temporary_folder_share_no_file(tmp_path, monkeypatch):
    for boot in ("one", "two"):
        (tmp_path / boot).write_text(boot)
        monkeypatch.setattr(cache, "_BOOT", tmp_path / boot)
        _forget()
        assert run(tmp_path) == "compiled"


def test_without_a_place_to_write_to_it_compiles_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/mpicomp")
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null/folder")
    assert [run(tmp_path), run(tmp_path), files(tmp_path)] == ["compiled", "compiled", []]


def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    trusted = cache.folder()
    assert trusted.stat().st_mode & 0o777 == 0o700
    trusted.chmod(0o770)
    _forget()
    assert cache.folder() == cache.local_folder() is not None
    trusted.rmdir()
    trusted.symlink_to(tmp_path)  # another user's who was there first
    _forget()
    assert cache.folder() == cache.local_folder()
    if os.getuid() == 0:
        trusted.unlink()
        trusted.mkdir(0o700)
        os.chown(trusted, 12345, -1)
        _forget()
        assert cache.folder() == cache.local_folder()


@pytest.mark.parametrize("kind", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("kept", [0, 0.5])
def test_a_file_that_was_cut_short_is_written_anew(tmp_path, kind, kept):
    run(tmp_path)
    [file] = files(tmp_path, kind)
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    assert [run(tmp_path), run(tmp_path)] == ["compiled", "loaded"]


def test_a_change_of_what_a_function_calls_is_noticed(tmp_path, monkeypatch):
    sources = tmp_path / "kernels"
    (sources / "cpu").mkdir(parents=True)
    monkeypatch.setattr(cache, "__file__", str(sources / "cache.py"))
    for text in ("", "# another line\n"):
        (sources / "cpu" / "lanes.py").write_text(text)
        _forget()
        assert run(tmp_path) == "compiled"
    assert run(tmp_path) == "loaded"


COMPILING = """
import sys, tempfile, time
tempfile.tempdir, folder = sys.argv[1:]
sys.path.insert(0, folder)
import numba
import doubling
from mpicomp.kernels import cache
class Slow(cache.HostCache):
    def save_overload(self, signature, compiled):
        print("compiled", flush=True)
        time.sleep(100)
cache.HostCache = Slow
cache.cached(numba.njit(doubling.twice))(21)
"""


@contextlib.contextmanager
def compiling_elsewhere(tmp_path):
    """Yield a process that compiles a function and holds its lock."""
    command = [sys.executable, "-c", COMPILING, tmp_path / "tmp", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "compiled\n"
        yield process
        process.kill()


def test_a_process_waits_for_a_while_for_one_that_compiles(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MAX_WAIT_S", 0.1)
    run(tmp_path, 1.5)
    written = files(tmp_path)
    with compiling_elsewhere(tmp_path):
        assert run(tmp_path, 1.5) == "loaded"  # at once: another signature compiles
        assert run(tmp_path) == "compiled"
        assert files(tmp_path) == written
    assert [run(tmp_path), run(tmp_path)] == ["compiled", "loaded"]  # a process that was killed holds none up


def start(tmp_path, code, *arguments, prefix=()):
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "real")}
    command = [*prefix, sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(process):
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out.splitlines()


LOADED = """
import sys
import numpy as np
from mpicomp.kernels import cpu
from mpicomp.kernels.cpu import select
array = np.arange(-5, 5, dtype=np.float32)
print(cpu.kth_magnitude(array, 3))  # with counters that it allocates
print(sorted({"numba.np.linalg", "numba.typed.typeddict", "scipy.linalg"} & set(sys.modules)))
import numba
bits, mask = array.view(np.uint32), np.uint32(0x7FFFFFFF)
print(numba.njit(lambda: select._kth_magnitude(bits, mask, 3, 11))())
print(numba.njit(lambda x: np.dot(x, x))(array))
"""


def test_a_process_that_only_loads_leaves_the_compiler_alone(tmp_path):
    """What is loaded without the compiler runs all that kernels do, and a function compiled later calls it."""
    first, second = (printed(start(tmp_path, LOADED)) for _ in range(2))
    bits = str(np.float32(4).view(np.uint32))
    assert first == [bits, "['numba.np.linalg', 'numba.typed.typeddict', 'scipy.linalg']", bits, "85.0"]
    assert second == [bits, "[]", bits, "85.0"]


@exact
def _product_and_sum(first, second, third, out):
    for i in range(out.size):
        out[i] = first[i] * second[i] + third[i]


@kernel
def _calls_it(first, second, third, out):
    _product_and_sum(first, second, third, out)


def test_product_and_sum_are_rounded_twice():
    """A fused multiply-add rounds once, and a host without it would get other bits."""
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        first, second, third = rng.normal(size=(3, 4096)).astype(dtype)
        for function in (_calls_it, _product_and_sum):
            out = np.empty(4096, dtype)
            function(first, second, third, out)
            product = first * second
            np.testing.assert_array_equal(out, product + third)


RUNNING = """
import os
import numpy as np
from mpicomp.kernels import cpu

def running():
    return len(os.listdir("/proc/self/task"))

gradient, residual = np.ones(1 << 20, np.float32), np.zeros(1 << 20, np.float32)
before = running()
for threads in (1, 3):
    cpu.accumulate(gradient, residual, np.empty_like(gradient), threads)
    cpu.tail_statistics(gradient, 0.5, 1, threads)
    cpu.kth_magnitude(gradient, 10)
    print(running() - before)
"""


def test_a_kernel_runs_on_the_threads_that_it_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_NUM_THREADS", "6")  # Numba starts all its threads with the first loop that is parallel
    for threads, more in zip((1, 3), map(int, printed(start(tmp_path, RUNNING))), strict=True):
        assert threads - 1 <= more < threads + 3  # the compiler may have one
