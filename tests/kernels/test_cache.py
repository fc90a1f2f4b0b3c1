"""Where compiled functions are kept: files that are missing, damaged, not to be written to, or somebody else's."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest
from mpicomp.kernels import cache
from mpicomp.kernels.cpu.compile import exact, kernel

SOURCE = """
def twice(number):
    return number + number
"""


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


def _forget():
    cache.folder.cache_clear()
    cache.local_folder.cache_clear()


def fresh(folder):
    """Return a function as a process that has just started has it: nothing compiled, and files that may be there."""
    path = folder / "doubling.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("doubling", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cache.cached(numba.njit(module.twice))


def call(function, number=21):
    """Call it, and say whether it was loaded or compiled."""
    assert function(number) == 2 * number
    stats = function.stats
    hits, misses = sum(stats.cache_hits.values()), sum(stats.cache_misses.values())
    assert hits + misses == 1
    return "loaded" if hits else "compiled"


def files(folder, pattern="*.nb?"):
    return sorted(folder.rglob(pattern))


def test_what_one_process_compiles_the_next_one_loads(tmp_path):
    first = fresh(tmp_path)
    assert not files(tmp_path)
    assert call(first) == "compiled"
    assert call(fresh(tmp_path)) == "loaded"
    assert call(fresh(tmp_path), 1.5) == "compiled"  # another signature, in the same list
    assert [call(fresh(tmp_path)), call(fresh(tmp_path), 1.5)] == ["loaded", "loaded"]
    assert files(tmp_path / "tmp") == files(tmp_path)


def test_the_folder_that_the_user_names_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    call(fresh(tmp_path))
    assert files(tmp_path / "xdg") == files(tmp_path) != []
    _forget()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "a" / "b"))  # made where it is not there
    call(fresh(tmp_path))
    assert len(files(tmp_path / "a" / "b")) == len(files(tmp_path)) / 2 > 0


def test_hosts_that_share_a_folder_share_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "shared"))
    for host in ("n1", "n2"):
        monkeypatch.setattr(cache.socket, "gethostname", lambda host=host: host)
        _forget()
        assert call(fresh(tmp_path)) == "compiled"
    assert call(fresh(tmp_path)) == "loaded"


def test_hosts_that_share_a_temporary_folder_share_no_file(tmp_path, monkeypatch):
    for boot in ("one", "two"):
        (tmp_path / boot).write_text(boot)
        monkeypatch.setattr(cache, "_BOOT", tmp_path / boot)
        _forget()
        assert call(fresh(tmp_path)) == "compiled"


def test_numbas_own_folder_is_left_as_it_was(tmp_path):
    before = numba.config.CACHE_DIR
    call(fresh(tmp_path))
    assert before == numba.config.CACHE_DIR


@pytest.mark.parametrize("place", ["/dev/null/folder", "/proc/mpicomp"])
def test_without_a_place_to_write_to_it_compiles_in_memory(tmp_path, monkeypatch, place):
    monkeypatch.setenv("NUMBA_CACHE_DIR", place)
    monkeypatch.setattr(tempfile, "tempdir", place)
    function = fresh(tmp_path)
    assert call(function) == "compiled"
    assert call(fresh(tmp_path)) == "compiled"
    assert function.stats.cache_path is None
    assert not files(tmp_path)


def test_without_a_temporary_folder_it_compiles_in_memory(tmp_path, monkeypatch):
    def none():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert call(fresh(tmp_path)) == "compiled"


def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    trusted = cache.folder()
    assert trusted.stat().st_mode & 0o777 == 0o700
    trusted.chmod(0o770)
    _forget()
    assert cache.folder() == cache.local_folder() is not None
    trusted.rmdir()
    trusted.symlink_to(tmp_path)  # somebody's who was there first
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
    call(fresh(tmp_path))
    [file] = files(tmp_path, kind)
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    assert call(fresh(tmp_path)) == "compiled"
    assert call(fresh(tmp_path)) == "loaded"


def test_a_change_of_what_a_function_calls_is_noticed(tmp_path, monkeypatch):
    call(fresh(tmp_path))
    copy = tmp_path / "kernels"
    (copy / "cpu").mkdir(parents=True)
    for path in [Path(cache.__file__), *Path(cache.__file__).parent.glob("cpu/*.py")]:
        (copy / path.relative_to(Path(cache.__file__).parent)).write_bytes(path.read_bytes())
    monkeypatch.setattr(cache, "__file__", str(copy / "cache.py"))
    names = []
    for text in ("", "\n# another line\n"):
        with (copy / "cpu" / "lanes.py").open("a") as file:
            file.write(text)
        cache._fingerprint.cache_clear()
        names.append(cache._fingerprint())
    cache._fingerprint.cache_clear()
    assert len(set(names)) == 2


def test_a_process_compiles_in_memory_after_its_patience(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "PATIENCE_S", 0.1)
    function = fresh(tmp_path)
    with compiling_elsewhere(tmp_path):
        assert call(function) == "compiled"
        assert not files(tmp_path)
    assert call(fresh(tmp_path)) == "compiled"  # a process that was killed holds nobody up
    assert files(tmp_path)


def test_cached_code_loads_while_another_signature_compiles(tmp_path):
    call(fresh(tmp_path), 1.5)
    with compiling_elsewhere(tmp_path):  # it would not return in time
        assert call(fresh(tmp_path), 1.5) == "loaded"


def test_ranks_of_a_host_compile_a_source_one_after_the_other():
    inside, held = [], threading.Event()

    def compile_alone(number):
        with cache.host_lock("source"):
            inside.append(number)
            if number == 0:
                held.set()
                time.sleep(0.2)
            inside.append(number)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(compile_alone, 0)
        held.wait(60)
        threads.submit(compile_alone, 1).result()
        first.result()
    assert inside == [0, 0, 1, 1]


COMPILING = """
import sys, tempfile, time
tempfile.tempdir, folder, name = sys.argv[1:]
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
    command = [sys.executable, "-c", COMPILING, tmp_path / "tmp", tmp_path, "twice"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "compiled\n"
        yield process
        process.kill()


# A process as users have it, with the kernels that are installed. It says how many it compiled and how many it loaded.
REAL = """
import numpy as np
from mpicomp.kernels import cpu
from mpicomp.kernels.cpu import select

array = np.array([3, -5, 1, 4], np.float32)
threshold = cpu.kth_magnitude(array, 2)
indices, values = np.empty(2, np.uint32), np.empty(2, np.float32)
cpu.select_largest(array, threshold, indices, values)
assert (indices.tolist(), values.tolist()) == ([1, 3], [-5, 4])
stats = [select._kth_magnitude.stats, select._select_largest.stats]
print(*(sum(sum(getattr(one, kind).values()) for one in stats) for kind in ("cache_misses", "cache_hits")))
"""


def real(tmp_path, prefix=(), **variables):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "real"), **variables}
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", REAL],
        env=environment,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process):
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    compiled, loaded = map(int, out.split())
    return compiled, loaded


OPPOSITE = """
import sys
import numpy as np
from mpicomp.kernels import cpu
from mpicomp.kernels.cpu import scatter, select

x, index, out = np.ones(9, np.float32), np.arange(3, dtype=np.uint32), np.empty(3, np.float32)
calls = [lambda: cpu.kth_magnitude(x, 2), lambda: cpu.gather(x, index, out), lambda: cpu.accumulate(x, x, x.copy())]
for call in calls[:: int(sys.argv[1])]:
    call()
functions = [select._kth_magnitude, scatter._gather, scatter._in_range]
stats = [function.stats for function in [*functions, sys.modules[cpu.accumulate.__module__]._accumulate]]
print(*(sum(sum(getattr(one, kind).values()) for one in stats) for kind in ("cache_misses", "cache_hits")))
"""


def test_processes_in_different_orders_compile_each_kernel_once(tmp_path):
    """They start at the same time: each waits for what the other is compiling."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "real")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    orders = ("1", "-1")
    processes = [
        subprocess.Popen([sys.executable, "-c", OPPOSITE, order], env=environment, **pipes) for order in orders
    ]
    counts = [outcome(process) for process in processes]
    assert sum(compiled for compiled, _ in counts) == 4


LOADED = (
    REAL
    + """
import sys
print(sorted({"numba.np.linalg", "numba.typed.typeddict", "scipy.linalg"} & set(sys.modules)))
import numba
array = np.arange(-5, 5, dtype=np.float32)
print(cpu.kth_magnitude(array, 3))  # with counters that it allocates
bits, mask = array.view(np.uint32), np.uint32(0x7FFFFFFF)
print(numba.njit(lambda: select._kth_magnitude(bits, mask, 3, 11))())
print(numba.njit(lambda x: np.dot(x, x))(array))
"""
)


def test_a_process_that_only_loads_leaves_the_compiler_alone(tmp_path):
    """What is loaded without the compiler runs all that kernels do, and a function compiled later calls it."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "real")}
    command = [sys.executable, "-c", LOADED]
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    )
    bits = str(np.float32(4).view(np.uint32))
    assert first == ["2 0", "['numba.np.linalg', 'numba.typed.typeddict', 'scipy.linalg']", bits, bits, "85.0"]
    assert second == ["0 2", "[]", bits, bits, "85.0"]


@pytest.mark.slow
def test_a_full_disk_costs_time_alone(tmp_path):
    # No file may grow, which is how a full disk looks to those that write.
    limited = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh"]
    assert outcome(real(tmp_path, limited)) == (2, 0)
    assert not files(tmp_path / "real")


def test_an_installation_that_nobody_may_write_to(tmp_path):
    """All of the file system is read-only, as in a container image, the home and the temporary folders too."""
    # Folders that may be mounts stay what they are: this very Python may be in the temporary one.
    bound = [f"mount --bind {path} {path} && mount -o remount,bind,ro {path}" for path in ("/tmp", "/dev/shm")]
    read_only = " && ".join(["mount -o remount,bind,ro /", *bound])
    alone = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{read_only} && exec "$@"', "sh"]
    try:
        able = subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("needs root and mount namespaces")
    assert outcome(real(tmp_path, alone)) == (2, 0)


def test_a_kernel_compiles_only_the_signatures_that_run(tmp_path):
    """Of functions that a sweep calls each is compiled once: none for a branch that is not taken, nor for a literal."""
    code = """if True:
        import numpy as np
        from mpicomp.kernels import cpu
        from mpicomp.kernels.cpu.accumulate import _add
        from mpicomp.kernels.cpu.tail import append_reaching

        x, index, bits = np.ones(3000, np.float32), np.empty(9, np.uint32), np.empty(9, np.uint32)
        cpu.accumulate_candidates(x, x, np.empty_like(x), 1, 0, index, bits, 0)
        print(*(len(function.signatures) for function in (_add, append_reaching)))"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"]


@exact
def _product_and_sum(first, second, third, out):
    for i in range(out.size):
        out[i] = first[i] * second[i] + third[i]


@kernel
def _calls_it(first, second, third, out):
    _product_and_sum(first, second, third, out)


def test_product_and_sum_are_rounded_twice():
    """A fused multiply-add rounds once, and a host without it would come to other bits."""
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
    cpu.tail(gradient, 0.5, 1, threads)
    cpu.kth_magnitude(gradient, 10)
    print(running() - before)
"""


def test_a_kernel_runs_on_the_threads_that_it_is_given():
    # Numba starts all its threads with the first loop that is parallel.
    environment = {**os.environ, "NUMBA_NUM_THREADS": "6"}
    command = [sys.executable, "-c", RUNNING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    for threads, more in zip((1, 3), map(int, done.stdout.split()), strict=True):
        assert threads - 1 <= more < threads + 3  # the compiler may have one
