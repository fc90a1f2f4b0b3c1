"""The study of policies: its words, its tables and its file."""

import json

import policies
import pytest
from no_processes import stand_in
from policy_jobs import Jobs, names_of
from study_words import call
from tables import check_types, documented


@pytest.fixture
def jobs(monkeypatch):
    return stand_in(monkeypatch, Jobs())


def test_the_command(jobs, tmp_path, capsys):
    path = tmp_path / "out.json"
    words = ["--policies", "auto,static", "--networks", "50mbit/1ms,1gbit/0us,50mbit/1ms", "--json", str(path)]
    assert call(policies, [*words]) == 0
    shown = capsys.readouterr().out
    digits, text = 5 * (2 + 2) + 2, 3 * (2 + 2) + 2
    assert f"{digits + text} runs, 4 hosts, at most 120 minutes" in shown
    assert len(jobs.commands) == digits + text == sum(" left, about " in line for line in shown.splitlines())
    assert f"{digits + text}/{digits + text}" in shown
    assert "0 left, about 0 minutes" in shown
    tables = [line for line in shown.splitlines() if line.startswith(("digits, 4 hosts", "text-lstm, 4 hosts"))]
    assert len(tables) == 4
    assert "shared: dense, static do not look at the network" in shown
    assert "not shared: auto" in shown
    written = json.loads(path.read_text())
    assert list(written) == ["schema", "environment", "rows", "runs"]
    assert written["schema"] == 1
    assert len(written["rows"]) == 2 * 2 * 3
    assert len(written["runs"]) == digits + text
    assert str(tmp_path) not in path.read_text()
    for name in ("rows", "runs"):
        fields = documented("studies.md", f"{name.capitalize()} of policies")
        for own in written[name]:
            assert list(own) == list(fields)
            check_types(own, fields)


def test_the_quick_form(jobs, capsys):
    assert call(policies, ["--quick", "--policies", "static,auto"]) == 0
    shown = capsys.readouterr().out
    assert f"{2 * (2 + 2 * 2)} runs, 4 hosts, at most 45 minutes" in shown
    links = {(command[8], command[10]) for command in jobs.commands if "lab" in command}
    assert links == {("200mbit", "1ms"), ("2.5gbit", "0us")}
    assert all(command[command.index("--seed") + 1] == "0" for command in jobs.commands)


def test_the_command_goes_on_where_it_stopped_and_fails_where_a_run_does(jobs, tmp_path, capsys):
    words = ["--quick", "--tasks", "digits", "--policies", "auto", "--keep", str(tmp_path / "k")]
    jobs.failing["digits-2.5gbit-0us-auto-0"] = "mpicomp: train: no\n"
    assert call(policies, words) == 1
    shown = capsys.readouterr().out
    assert "failed: mpicomp: train: no" in shown
    assert "seed 0: mpicomp: train: no" in shown
    jobs.failing.clear()
    jobs.commands.clear()
    assert call(policies, words) == 0
    assert names_of(jobs) == ["digits-2.5gbit-0us-auto-0", "digits-2.5gbit-0us-timing-0"]
    assert "there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--policies", "atuo"], "policies: --policies: unknown name 'atuo'; did you mean 'auto'?"),
        (["--policies", ","], "policies: --policies names nothing"),
        (["--tasks", "vgg"], "policies: --tasks: unknown name 'vgg'"),
        (["--networks", "1gbit"], "lab: a network must be like 50mbit/1ms, got '1gbit'"),
        (["--networks", ","], "policies: --networks names nothing"),
        (["--seeds", "a"], "policies: --seeds must be whole numbers such as 0,1,2, got 'a'"),
        (["--seeds", "-1"], "policies: --seeds must be at least 0, got -1"),
        (["--steps", "0"], "policies: --steps must be at least 1, got 0"),
        (["--hosts", "1"], "policies: --hosts must be at least 2, got 1"),
        (["--limit", "0"], "policies: --limit must be minutes above 0, got 0.0"),
        (["--json", "/nonexistent/out.json"], "policies: '/nonexistent/out.json' cannot be written"),
        (["--keep", "a,b"], "policies: --keep must be a folder without commas, got 'a,b'"),
        (["--keep", "/proc/none"], "policies: '/proc/none/files' cannot be written"),
    ],
)
def test_bad_words_are_told_before_anything_is_run(arguments, text, jobs, capsys):
    assert call(policies, [*arguments]) == 2
    shown = capsys.readouterr()
    assert text in shown.err
    assert shown.out == ""
    assert jobs.commands == []


def test_labs_need_root(monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert call(policies, []) == 2
    assert "policies: a lab needs root to make network namespaces" in capsys.readouterr().err
