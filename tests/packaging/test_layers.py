"""Imports point down only, and MPI, torch and CuPy stay where they belong."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From the top down. A file may import what stands in the lines below, and its own package; the longest name counts.
LAYERS = [
    ["studies"],
    ["mpicomp.bench.commands"],
    ["mpicomp.cli"],
    ["mpicomp.bench"],
    ["mpicomp.bench.report"],
    ["mpicomp.bench.measure"],
    ["mpicomp.bench.lab", "mpicomp.bench.tasks"],
    ["mpicomp.systems"],
    ["mpicomp.torch", "mpicomp.testing", "mpicomp.checkpoint", "mpicomp.bounded"],
    ["mpicomp.reducer", "mpicomp.forecast"],
    ["mpicomp.policies", "mpicomp.job.doctor"],
    ["mpicomp.cost"],
    ["mpicomp.collectives"],
    ["mpicomp.compressors", "mpicomp.gpu.routes"],
    ["mpicomp.mpi"],
    ["mpicomp.workspace"],
    ["mpicomp.gpu"],
    ["mpicomp.arrays", "mpicomp.registry"],
    ["mpicomp.plugins", "mpicomp.kernels"],
    ["mpicomp.job", "mpicomp.setting_checks"],
    ["mpicomp.errors", "mpicomp._version"],
]
# Who may import what from outside, at whatever place in the file.
HOMES = {
    "mpi4py": (
        *(
            f"mpicomp/mpi/{name}.py"
            for name in ("comm", "channel", "pool", "watchdog", "mailbox", "failures", "end", "connect")
        ),
        "mpicomp/gpu/routes.py",
        "mpicomp/job/abort.py",
        "mpicomp/job/doctor/",
    ),
    "torch": (
        "mpicomp/torch/",
        "mpicomp/systems/lgc/autoencoder.py",
        "bench/peers.py",
        "bench/train.py",
        "bench/trainer.py",
        "bench/training.py",
        "bench/commands/bench_training.py",
        "bench/tasks/",
        "studies/papers/paper_tasks.py",
        "studies/update_exchanges.py",
    ),
    "matplotlib": ("bench/report/", "studies/"),
    "msgspec": (
        "bench/report/runs.py",
        "bench/measure/metrics.py",
        "bench/measure/run_fields.py",
        "bench/commands/train.py",
    ),
    "cupy": ("mpicomp/gpu/",),
    "cupyx": ("mpicomp/gpu/",),
}

FILES = [
    path.relative_to(ROOT) for top in ("mpicomp", "kernels", "bench", "studies") for path in (ROOT / top).rglob("*.py")
]


def module_of(path):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    return name if name.startswith(("mpicomp", "studies")) else f"mpicomp.{name}"


def imported(path):
    """Yield what a file imports; scripts of studies import each other by their bare names."""
    studies = {script.stem for script in (ROOT / "studies").rglob("*.py")}
    for name in _imported(path):
        yield f"studies.{name}" if name.partition(".")[0] in studies else name


def _imported(path):
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # "from mpicomp import abort" names a module of its own
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def place_of(name):
    """Return the layer of a module and the package in it, or None for what is not of mpicomp."""
    known = {prefix: depth for depth, prefixes in enumerate(LAYERS) for prefix in prefixes}
    prefixes = [prefix for prefix in known if name == prefix or name.startswith(prefix + ".")]
    longest = max(prefixes, key=len, default=None)
    return None if longest is None else (known[longest], longest)


@pytest.mark.quick
def test_imports_point_down():
    wrong = []
    for path in FILES:
        layer = place_of(module_of(path))
        if layer is None:  # the package's face
            assert str(path) in ("mpicomp/__init__.py", "mpicomp/__main__.py")
            continue
        for name in imported(path):
            other = place_of(name)
            if other is not None and other[1] != layer[1] and other[0] <= layer[0]:
                wrong.append(f"{path} imports {name}, which does not stand below it")
    assert wrong == []


@pytest.mark.quick
def test_published_systems_are_imported_by_themselves_alone():
    """The library finds them by name, as it finds plugins; studies, which measure them, may import them."""
    wrong = []
    for path in FILES:
        importer = module_of(path)
        for name in imported(path):
            system = ".".join(name.split(".")[:3])
            if name.startswith("mpicomp.systems") and not importer.startswith(("studies.", system)):
                wrong.append(f"{path} imports {name}")
    assert wrong == []


@pytest.mark.quick
def test_what_comes_from_outside_stays_at_home():
    wrong = []
    for path in FILES:
        for name in imported(path):
            homes = HOMES.get(name.partition(".")[0])
            if homes is not None and not str(path).startswith(tuple(homes)):
                wrong.append(f"{path} imports {name}")
    assert wrong == []
