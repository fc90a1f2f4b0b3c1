"""Commands that are run to their end, and what they say last."""

import sys
import time
from pathlib import Path

import pytest
from lab_jobs import execute, last_words


def test_execute_ends_with_the_command_or_the_time(tmp_path):
    log = tmp_path / "log"
    words = "import sys; print('here', flush=True); print('ValueError: there', file=sys.stderr); sys.exit(5)"
    assert execute([sys.executable, "-c", words], {}, log, 60.0) == 5
    assert log.read_text().splitlines()[0] == "here"
    assert last_words(log) == "ValueError: there"
    pid = tmp_path / "pid"
    words = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    begin = time.monotonic()
    assert execute([sys.executable, "-c", words], {}, log, 2.0) is None
    assert time.monotonic() - begin < 50
    assert not Path(f"/proc/{pid.read_text()}").exists()


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("", ""),
        ("a\nb\n\n", "b"),
        ("lab: needs root\n", "lab: needs root"),
        (
            "Traceback\n  x\nmpicomp.errors.MpicompError: bad: worse\n=== EXIT CODE: 1\n",
            "mpicomp.errors.MpicompError: ",
        ),
        ("mpicomp: train: no\nsome more\n", "mpicomp: train: no"),
    ],
)
def test_last_words_are_the_last_line_of_an_error(text, last, tmp_path):
    (tmp_path / "log").write_text(text)
    assert last_words(tmp_path / "log").startswith(last)
    assert last_words(tmp_path / "none") == ""
