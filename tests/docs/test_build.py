"""The documentation builds without a warning, and its links lead somewhere."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import mpicomp.policies  # noqa: F401 (with the packages below it)
from mpicomp.registry import REGISTRIES

ROOT = Path(__file__).resolve().parents[2]
NEEDS = ("sphinx", "myst_parser", "numpydoc", "furo", "torch")
MISSING = [name for name in NEEDS if importlib.util.find_spec(name) is None]
PAGES = {"compressor": "compressors.html", "collective": "collectives.html", "policy": "api.html"}

check = runpy.run_path(str(ROOT / "docs" / "links.py"))["check"]


@pytest.mark.skipif(bool(MISSING), reason=f"needs the extras docs and torch: there is no {', '.join(MISSING)}")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_documentation_builds(tmp_path):
    command = [sys.executable, "-P", "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "trees"]
    environ = os.environ | {"TOKEN": "secret-of-the-builder"}
    command += [ROOT / "docs", tmp_path / "html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    for kind, name in PAGES.items():
        page = (tmp_path / "html" / name).read_text()
        for registered in REGISTRIES[kind].names():
            if REGISTRIES[kind].plugin(registered) is None:
                assert f'.{REGISTRIES[kind].cls(registered).__name__}"' in page, registered
    pages = "".join(page.read_text() for page in (tmp_path / "html").glob("*.html"))
    assert str(ROOT) not in pages
    assert environ["TOKEN"] not in pages
    wrong, elsewhere = check(tmp_path / "html")
    assert wrong == []
    assert any(address.startswith("https://arxiv.org/") for address in elsewhere)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "slurm/README.md"])
def test_pages_outside_the_site_link_to_files(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert links
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_no_page_has_more_than_400_lines():
    lines = {
        page.name: len(page.read_text().splitlines()) for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    }
    assert {name for name, count in lines.items() if count > 400} == set()
    assert lines["README.md"] <= 110
