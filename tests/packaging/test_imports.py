"""What an import loads, from the checkout and from a plain install; each in a process of its own."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ["mpi4py.MPI", "torch", "cupy", "safetensors"]
# Each opens hundreds of files, which hundreds of ranks do at once on one file system; what needs them loads them.
SLOW = ["numpy", "numba", "llvmlite", "scipy", "sklearn", "rich", "pymoo", "matplotlib", "msgspec"]


def python(code, executable=sys.executable, cwd="/"):
    done = subprocess.run([executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("module", "names"),
    [
        *((module, HEAVY + SLOW) for module in ("mpicomp", "mpicomp.cli", "mpicomp.kernels", "mpicomp.bench.lab")),
        *((f"mpicomp.bench{module}", HEAVY) for module in ("", ".measure", ".report", ".tasks")),
    ],
)
def test_import_loads_nothing_heavy_or_slow(module, names):
    assert python(f"import sys, {module}; print([name for name in {names} if name in sys.modules])") == "[]"


def test_every_public_name_is_there_and_loads_torch_on_first_use():
    pytest.importorskip("torch")
    code = """if True:
        import sys, mpicomp
        before = "torch" in sys.modules
        mpicomp.torch
        print(before, "torch" in sys.modules, [name for name in mpicomp.__all__ if not hasattr(mpicomp, name)])"""
    assert python(code) == "False True []"
    with pytest.raises(AssertionError, match="module 'mpicomp' has no attribute 'Redcuer'"):
        python("import mpicomp; mpicomp.Redcuer")


@pytest.mark.timeout(300)
def test_plain_install_has_all_and_no_common_name(tmp_path):
    """A copy of the tracked files is installed without -e next to this Python's packages."""
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if files.returncode != 0:
        pytest.skip("not a git checkout")
    source = tmp_path / "source"
    for name in files.stdout.splitlines():
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    home = tmp_path / "venv"
    venv.create(home)
    executable = str(home / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", executable, "install", "--quiet", "--no-deps", str(source)]
    subprocess.run([*pip, "--disable-pip-version-check"], check=True, timeout=250)
    # What it needs is found where this Python has it; mpicomp itself must come from the new place.
    theirs = [path for path in sys.path if path.endswith("site-packages")]
    code = f"""if True:
        import importlib.util, pkgutil, sys
        names = [name for name in ("kernels", "bench", "studies", "tests") if importlib.util.find_spec(name)]
        sys.path += {theirs!r}
        sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
        import mpicomp, mpicomp.kernels.cpu, mpicomp.bench.lab, mpicomp.bench.tasks, mpicomp.cli
        import mpicomp.bench.measure.results
        assert mpicomp.__file__.startswith({str(home)!r}), mpicomp.__file__
        found = [m.name for m in pkgutil.walk_packages(mpicomp.__path__, "mpicomp.") if m.ispkg]
        print(names, sorted(found))"""
    installed = python(code, executable)
    packages = {
        "mpicomp." + str(path.parent.relative_to(ROOT / "mpicomp")).replace("/", ".")
        for path in (ROOT / "mpicomp").rglob("__init__.py")
    }
    packages |= {
        "mpicomp." + str(path.parent.relative_to(ROOT)).replace("/", ".")
        for top in ("kernels", "bench")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert installed == f"[] {sorted(packages - {'mpicomp..'})}"
    assert (home / "bin" / "mpicomp").exists()
    assert list(home.rglob("mpicomp/py.typed"))
