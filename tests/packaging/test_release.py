"""What a release consists of: a wheel and a source distribution that work where there is no checkout."""

import importlib.util
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from mpicomp import __version__

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = (".py", ".pyi", ".cu", ".cuh", ".html", "py.typed")
SOURCE = "https://example.org/owner/mpicomp"
RELATIVE = re.compile(r"\]\((?!https?:)")
PLACES = {"kernels/": "mpicomp/kernels/", "bench/": "mpicomp/bench/", "mpicomp/": "mpicomp/"}


@pytest.mark.parametrize(
    ("name", "schema"), [("CITATION.cff", "citation-file-format"), (".readthedocs.yaml", "readthedocs")]
)
def test_files_for_other_tools_are_valid(name, schema):
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(ROOT / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_version_of_citation_and_changelog_is_that_of_the_package():
    [cited] = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    listed = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert cited == __version__
    assert next(name for name in listed if name != "Unreleased") == __version__
    assert len(set(listed)) == len(listed)


def published(source):
    """Say in a copy of the repository where it is published."""
    settings = (source / "setup.cfg").read_text()
    (source / "setup.cfg").write_text(
        settings.replace("[metadata]\n", f"[metadata]\nproject_urls =\n    Source = {SOURCE}/\n")
    )


@pytest.mark.parametrize("is_published", [False, True])
def test_description_on_a_package_index_has_links_that_lead(tmp_path, monkeypatch, is_published):
    for name in ("setup.py", "setup.cfg", "README.md", "mpicomp/_version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    if is_published:
        published(tmp_path)
    settings = {}
    monkeypatch.setattr("setuptools.setup", lambda **words: settings.update(words))
    runpy.run_path(str(tmp_path / "setup.py"))
    description, readme = settings["long_description"], (ROOT / "README.md").read_text()
    assert len(RELATIVE.findall(readme)) > 20
    assert not RELATIVE.search(description)
    for words, target in re.findall(r"(?<!!)\[([^\]]+)\]\((?!https?:)([^)]+)\)", readme):
        assert (f"[{words}]({SOURCE}/blob/v{__version__}/{target})" if is_published else words) in description
    assert (f"({SOURCE}/raw/v{__version__}/docs/pictures/" in description) == is_published


def tracked():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheel_of_the_source_trains_without_a_checkout(tmp_path):
    if importlib.util.find_spec("build") is None:
        pytest.skip("there is no build: pip install build")
    source, files = tmp_path / "source", tracked()
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    published(source)
    subprocess.run([sys.executable, "-m", "build", source], check=True, timeout=300, capture_output=True)
    [wheel], [sdist] = (source / "dist").glob("*.whl"), (source / "dist").glob("*.tar.gz")
    assert wheel.name == f"mpicomp-{__version__}-py3-none-any.whl"

    expected = {
        PLACES[place] + name.removeprefix(place)
        for name in files
        for place in PLACES
        if name.startswith(place) and name.endswith(SHIPPED)
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        [metadata] = [archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA")]
    assert held == expected
    assert "\nLicense-File: LICENSE\n" in metadata
    assert "\nDescription-Content-Type: text/markdown\n" in metadata
    assert f"\nProject-URL: Source, {SOURCE}/\n" in metadata
    assert f"]({SOURCE}/blob/v{__version__}/docs/" in metadata
    assert not RELATIVE.search(metadata)
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.cfg", "setup.py"} <= held
    assert {name for name in files if name.startswith(tuple(PLACES)) and name.endswith(SHIPPED)} <= held

    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python, [packages] = home / "bin" / "python", home.glob("lib/python*/site-packages")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, f"{wheel}[mpich,bench,report]"], check=True, timeout=300)
    # PyTorch alone is this Python's, whose links to a checkout are not followed from there.
    theirs = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "theirs.pth").write_text("\n".join(theirs) + "\n")
    mpiexec, here = home / "bin" / "mpiexec", home / "bin" / "mpicomp"

    def printed(*command, folder=tmp_path):
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert printed(python, "-c", "import mpicomp; print(mpicomp.__file__)").startswith(str(home))
    assert "topk" in printed(here, "list")
    assert __version__ in printed(here, "--version")
    assert "ranks       2" in printed(mpiexec, "-n", "2", here, "doctor")
    if importlib.util.find_spec("torch"):
        assert "verdict: " in printed(mpiexec, "-n", "2", here, "train", "--task", "digits", "--steps", "4")
        (tmp_path / "empty").mkdir()
        assert "LocalMuon took " in printed(here, "tour", "--steps", "10", folder=tmp_path / "empty")
        assert [path.name for path in (tmp_path / "empty").iterdir()] == ["tour.html"]
