"""Doctests of bench/ and kernels/ are collected under the names these modules have when installed.

Imported a second time as ``bench.tasks.digits``, a module would register its classes in a second registry.
"""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parent


def pytest_collect_file(file_path):
    """Import a module by its installed name, before pytest does so by its path."""
    names = file_path.relative_to(ROOT).with_suffix("").parts
    if names[0] in ("bench", "kernels") and file_path.suffix == ".py":
        name = ".".join(names).removesuffix(".__init__")
        sys.modules[name] = importlib.import_module(f"mpicomp.{name}")
