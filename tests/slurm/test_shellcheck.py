"""What a shell would stumble over in the templates."""

import shutil
import subprocess
from pathlib import Path

import pytest

TEMPLATES = sorted((Path(__file__).resolve().parents[2] / "slurm").glob("*.sbatch"))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck (Debian: apt-get install shellcheck)")
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(template):
    done = subprocess.run(["shellcheck", template], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
