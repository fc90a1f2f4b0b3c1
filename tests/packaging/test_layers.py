"""Imports point down only, and MPI, torch and CuPy stay where they belong."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the top down. A file may import what stands in its own line and in the lines below; the longest name counts.
LAYERS = [
    ["studies"],
    ["mpicomp.abort", "mpicomp.cuda"],  # where these were
    ["mpicomp.cli"],
    ["mpicomp.bench", "mpicomp.doctor"],
    ["mpicomp.bench.measure"],
    ["mpicomp.bench.lab", "mpicomp.bench.tasks"],
    ["mpicomp.torch"],
    ["mpicomp.testing", "mpicomp.checkpoint"],
    ["mpicomp.reducer"],
    ["mpicomp.policies"],
    ["mpicomp.cost"],
    ["mpicomp.collectives"],
    ["mpicomp.compressors", "mpicomp.transport"],
    ["mpicomp.rounds", "mpicomp.arrays", "mpicomp.workspace", "mpicomp.registry"],
    ["mpicomp.system", "mpicomp.kernels", "mpicomp.errors", "mpicomp.deprecation", "mpicomp._version"],
]
# Who may import what from outside, at whatever place in the file.
HOMES = {
    "mpi4py": ("mpicomp/transport/mpi", "mpicomp/system/abort.py", "mpicomp/doctor/"),
    "torch": (
        "mpicomp/torch/",
        "mpicomp/compressors/autoencoder.py",
        "bench/train.py",
        "bench/trainers.py",
        "bench/gloo.py",
        "bench/tasks/",
    ),
    "cupy": (),
}

FILES = [
    path.relative_to(ROOT) for top in ("mpicomp", "kernels", "bench", "studies") for path in (ROOT / top).rglob("*.py")
]


def module_of(path):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    return name if name.startswith(("mpicomp", "studies")) else f"mpicomp.{name}"


def imported(path):
    """Yield what a file imports; scripts of studies import each other by their bare names."""
    studies = {script.stem for script in (ROOT / "studies").glob("*.py")}
    for name in _imported(path):
        yield f"studies.{name}" if name.partition(".")[0] in studies else name


def _imported(path):
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # "from mpicomp import abort" names a module of its own
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(name):
    """Return the depth of the longest prefix that is known; None where none is."""
    known = {prefix: depth for depth, prefixes in enumerate(LAYERS) for prefix in prefixes}
    own = [prefix for prefix in known if name == prefix or name.startswith(prefix + ".")]
    return known[max(own, key=len)] if own else None


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_down(path):
    own = layer_of(module_of(path))
    if own is None:  # the package's face
        assert str(path) in ("mpicomp/__init__.py", "mpicomp/__main__.py")
        return
    for name in imported(path):
        depth = layer_of(name)
        assert depth is None or depth >= own, f"{path} imports {name}, which stands above it"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_what_comes_from_outside_stays_at_home(path):
    for name in imported(path):
        homes = HOMES.get(name.partition(".")[0])
        assert homes is None or str(path).startswith(tuple(homes)), f"{path} imports {name}"
