"""Tables on a terminal."""

import io

import pytest
from mpicomp.bench.measure import results

rich_console = pytest.importorskip("rich.console")


def shown(monkeypatch, capsys, columns, width):
    screen = io.StringIO()
    console = rich_console.Console(file=screen, force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(rich_console, "Console", lambda: console)
    results.show([{f"c{number}": "a long word" for number in range(columns)}], {f"c{n}": "" for n in range(columns)})
    return screen.getvalue(), capsys.readouterr().out


def test_table_that_fits_is_framed(monkeypatch, capsys):
    screen, printed = shown(monkeypatch, capsys, columns=3, width=80)
    assert "│ a long word │ a long word │ a long word │" in screen
    assert not printed


def test_wide_table_is_plain_text(monkeypatch, capsys):
    """As under Open MPI, whose mpiexec gives ranks a terminal of 80 letters."""
    screen, printed = shown(monkeypatch, capsys, columns=12, width=80)
    assert not screen
    assert printed.splitlines()[1] == "  ".join(["a long word"] * 12)
