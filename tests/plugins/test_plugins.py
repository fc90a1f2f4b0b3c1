"""Plugins: how they are found, what is read of them and when, and what is said where one cannot be."""

import os
import subprocess
import sys
import textwrap

import pytest
from marks import slow

COMPRESSOR = """
from dataclasses import dataclass
from typing import ClassVar
import mpicomp
{above}
@mpicomp.register
@dataclass(frozen=True, repr=False)
class Mine(mpicomp.TopK):
    id: ClassVar[str] = "{name}"
    paper: ClassVar[str] = "none: a test"
    count_of_imports: ClassVar[list] = []
print("read {name}")
"""
MADE = 'import mpicomp; print(type(mpicomp.get_compressor("mine")).__name__); '


@pytest.fixture
def plugin(tmp_path):
    """Write a plugin, and return its path."""

    def write(name="mine", file="mine.py", above=""):
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(COMPRESSOR.format(name=name, above=above))
        return path

    return write


@pytest.fixture
def python(tmp_path):
    """Run code in another process, outside the checkout."""

    def start(code, plugins=(), path=(), status=0):
        env = os.environ | {
            "MPICOMP_PLUGINS": os.pathsep.join(map(str, plugins)),
            "PYTHONPATH": os.pathsep.join(map(str, path)),
        }
        command = [sys.executable, "-c", textwrap.dedent(code)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=100, check=False)
        assert done.returncode == status, done.stderr
        return done

    return start


def last_line(done):
    return done.stderr.strip().splitlines()[-1]


def test_plugin_is_read_at_the_first_look_up(plugin, python):
    code = "import mpicomp, mpicomp.reducer, mpicomp.cli; mpicomp.TopK(); print('imported'); mpicomp.list_compressors()"
    assert python(code, [plugin()]).stdout.split("\n")[:2] == ["imported", "read mine"]


def test_plugin_under_many_names_is_read_once(plugin, python, tmp_path):
    path = plugin()
    (tmp_path / "link.py").symlink_to(path)
    (tmp_path / "sub").mkdir()
    names = [path, "mine.py", "./sub/../mine.py", "link.py", "mine"]
    done = python(MADE + "from mpicomp import plugins; print(len(plugins.loaded()))", names, path=[tmp_path])
    assert done.stdout.split("\n")[:3] == ["read mine", "Mine", "1"]


def test_plugin_imported_by_the_script_is_read_once(plugin, python, tmp_path):
    path = plugin()
    for code in ("import mine; ", "import mpicomp; mpicomp.list_compressors(); import mine; "):
        done = python(code + MADE + "assert type(mpicomp.get_compressor('mine')) is mine.Mine", [path], [tmp_path])
        assert "Mine" in done.stdout
    assert python("import mine; " + MADE, [path], [tmp_path]).stdout.count("read mine") == 1


def test_plugins_of_one_name_in_two_folders_are_two(plugin, python):
    first, second = plugin("mine", "a/mine.py"), plugin("mine2", "b/mine.py")
    code = MADE + "print(mpicomp.get_compressor('mine2').id, type(mpicomp.get_compressor('mine2')).__module__)"
    assert "mine2 mpicomp_plugin_mine_" in python(code, [first, second]).stdout


def test_plugin_with_a_name_in_use_is_refused(plugin, python):
    done = python(MADE, [plugin("mine", "a.py"), plugin("mine", "b.py")], status=1)
    assert "ConfigurationError: plugin: " in last_line(done)
    assert "compressor: 'mine' is already mpicomp_plugin_a_" in last_line(done)
    done = python(MADE, [plugin("topk")], status=1)
    assert "compressor: 'topk' is already mpicomp.compressors.topk.TopK" in last_line(done)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing.py", "there is no file 'missing.py'"),
        slow("missing/file.py", "there is no file 'missing/file.py'"),
        ("missing_module", "there is no module 'missing_module'"),
        slow("missing_package.module", "cannot be loaded: ModuleNotFoundError"),
        ("present", "there is no module 'present'; a file is named with its ending, as in present.py"),
        slow("./present.txt", "a file's name has to end in .py, got './present.txt'"),
        ("raises.py", "'raises.py' cannot be loaded: ZeroDivisionError: division by zero"),
        slow("leaves.py", "'leaves.py' cannot be loaded: SystemExit: 3"),
    ],
)
def test_plugin_that_fails_raises_at_every_look_up(python, tmp_path, name, text):
    for file, content in {"present.py": "", "present.txt": "", "raises.py": "1 / 0", "leaves.py": "exit(3)"}.items():
        (tmp_path / file).write_text(content)
    done = python(
        """
        import sys, mpicomp
        sys.path.remove("")
        for look in (mpicomp.list_compressors, mpicomp.list_policies, mpicomp.list_compressors):
            try:
                look()
            except mpicomp.errors.ConfigurationError as error:
                print(error)
        """,
        [name],
    )
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 3
    assert all(text in line for line in lines)


def test_plugin_added_after_a_look_up_is_found(plugin, python):
    code = f"import mpicomp; mpicomp.list_compressors(); from mpicomp import plugins; plugins.add({str(plugin())!r}); "
    assert "Mine" in python(code + MADE).stdout


def test_plugin_path_with_the_separator_is_refused(plugin, python):
    path = plugin(file="a:b/mine.py")
    done = python(f"from mpicomp import plugins; plugins.add({str(path)!r})", status=1)
    assert "separates plugins in MPICOMP_PLUGINS and cannot be in a path" in last_line(done)


def test_registered_names_differ_from_built_in_ones(plugin, python):
    path = plugin()
    code = "from mpicomp.compressors import COMPRESSORS; print(COMPRESSORS.plugin('mine'), COMPRESSORS.plugin('topk'))"
    assert python(code, [path]).stdout.splitlines()[-1] == f"{path} None"


def installed(folder, points):
    """Make a package that was installed, with entry points."""
    info = folder / "plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    lines = [f"{name} = {module}" for name, module in points.items()]
    (info / "entry_points.txt").write_text("[mpicomp.plugins]\n" + "\n".join(lines) + "\n")


def test_entry_point_is_found_and_a_broken_one_warns(plugin, python, tmp_path):
    plugin(file="site/plugin_package/__init__.py")
    (tmp_path / "site" / "broken_package.py").write_text("import nothing_of_that_name")
    installed(tmp_path / "site", {"broken": "broken_package", "gone": "gone_package", "good": "plugin_package:Mine"})
    done = python(MADE, path=[tmp_path / "site"])
    assert "Mine" in done.stdout
    assert done.stderr.count("UserWarning") == 2
    assert "plugin: 'broken_package' cannot be loaded: ModuleNotFoundError: No module named" in done.stderr
    assert "it is an entry point, 'gone', and left out" in done.stderr


def test_register_without_a_kind_or_name_is_refused(python):
    code = "import mpicomp\n@mpicomp.register\nclass Mine{}:\n    {}"
    done = python(code.format("", "pass"), status=1)
    assert "is neither a Compressor, a Scheme, a Policy nor a Task; derive it from one of them" in last_line(done)
    done = python(code.format("(mpicomp.Sparsifier)", "pass"), status=1)
    assert "compressor: Mine needs id, a string, got None" in last_line(done)
    done = python(code.format("(mpicomp.Sparsifier)", "id = 'mine'"), status=1)
    assert "compressor: 'mine' lacks select, paper; see docs/extending.md" in last_line(done)
