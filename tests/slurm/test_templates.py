"""What holds for every template: it can be copied alone, is started in one way, and says so."""

import os
import shutil
import subprocess

import pytest
from slurm.jobs import TEMPLATES

every_template = pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)


@every_template
def test_outside_slurm_it_says_in_one_line_what_to_do(template, clean_environ, tmp_path):
    done = subprocess.run(
        ["bash", template], env=clean_environ, cwd=tmp_path, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"{template}: this is a batch script for Slurm; submit it: sbatch {template}\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck (Debian: apt-get install shellcheck)")
@every_template
def test_shellcheck_finds_nothing(template):
    done = subprocess.run(["shellcheck", template], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
