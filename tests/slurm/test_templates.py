"""What holds for every template: it can be copied alone, is started in one way, and says so."""

import os
import shutil
import subprocess

import pytest
from slurm.jobs import TEMPLATES

every_template = pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)


def preamble(template):
    text = template.read_text()
    begin, end = "# From here to the next such line", "# The same up to here.\n"
    assert text.count(begin) == text.count(end) == 1
    return text[text.index(begin) : text.index(end)]


@every_template
def test_preamble_is_the_same_everywhere(template):
    assert preamble(template) == preamble(TEMPLATES[0])
    lines, first = (path.read_text().splitlines() for path in (template, TEMPLATES[0]))
    for knob in ("MODULES", "VENV", "LAUNCH"):
        [line] = [line for line in lines if line.startswith(f"{knob}=")]
        assert line in first


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
