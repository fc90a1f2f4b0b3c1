"""Every command line that the pages show is one that its program understands."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from mpicomp import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "slurm" / "README.md", *(ROOT / "docs").glob("*.md")]


def commands(page):
    """Yield the command lines of a page's blocks, those of several lines as one."""
    for kind, block in re.findall(r"^```(console|sh)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        text = block.replace("\\\n", " ")
        lines = re.findall(r"^\$ (.*)$", text, flags=re.MULTILINE) if kind == "console" else text.splitlines()
        for line in lines:
            yield from (part.strip() for part in line.partition(" #")[0].split("&&"))


def understand(words):
    """Have the program that a command line starts read its words; whatever starts that program is passed over."""
    for place, word in enumerate(words):
        if word in ("install", "conda"):
            return
        if word == "mpicomp" or word.endswith("/mpicomp"):
            arguments = words[place + 1 :]
            inner = arguments.index("--") if "--" in arguments else len(arguments)
            cli._parse(arguments[:inner] + (["--", "true"] if inner < len(arguments) else []))
            understand(arguments[inner + 1 :])
            return
        study = re.search(r"studies/(\w+)\.py$", word)
        if study and hasattr(importlib.import_module(study[1]), "parser"):
            importlib.import_module(study[1]).parser().parse_args(words[place + 1 :])
            return


CASES = [(page.name, line) for page in PAGES for line in commands(page)]


def check(cases):
    for page, line in cases:
        try:
            understand(shlex.split(line))
        except SystemExit as leaving:
            assert leaving.code == 0, f"{page}: {line}"  # noqa: PT017, --help leaves, too


def test_commands_are_understood():
    check(case for case in CASES if "studies/" not in case[1])


@pytest.mark.slow  # they load PyTorch
def test_those_of_studies_are_understood():
    check(case for case in CASES if "studies/" in case[1])


def test_every_study_is_in_their_table():
    listed = set(re.findall(r"^\| (?:\[)?`(\w+)/?`", (ROOT / "docs" / "studies.md").read_text(), flags=re.MULTILINE))
    scripts = {path.stem for path in (ROOT / "studies").glob("*.py") if "__main__" in path.read_text()}
    assert scripts <= listed
