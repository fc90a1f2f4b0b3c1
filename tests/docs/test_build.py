"""The documentation builds without a warning."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from mpicomp.registry import REGISTRIES

ROOT = Path(__file__).resolve().parents[2]
MISSING = [name for name in ("sphinx", "myst_parser", "numpydoc") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"needs the extra docs: there is no {', '.join(MISSING)}")
@pytest.mark.timeout(300)
def test_the_documentation_builds(tmp_path):
    command = [sys.executable, "-P", "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "trees"]
    done = subprocess.run(
        [*command, ROOT / "docs", tmp_path / "html"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "html" / "api.html").read_text()
    for kind in ("compressor", "collective", "policy"):
        for name in REGISTRIES[kind].names():
            if REGISTRIES[kind].plugin(name) is None:
                assert f'.{REGISTRIES[kind].cls(name).__name__}"' in page, name
