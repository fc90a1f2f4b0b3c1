"""``mpicomp tour``: three trainings, three bars, a sentence and a report, in a lab and without one."""

import argparse
import re
import subprocess
import sys

import pytest
from lab.labs import AS_A_USER, FORBIDDEN, MAIN, reason_without_lab, reason_without_user_namespaces

from mpicomp.mpi import LocalWorld

NAMES = ["dense", "auto", "LocalMuon"]
STEPS, PARAMETERS = 10, 38_282


def call(*options, prefix=(), **more):
    command = [*prefix, sys.executable, "-c", MAIN, "tour", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, **more)


def _parts(text):
    """The output of each training."""
    return re.split(rf"^(?:{'|'.join(NAMES)})$", text, flags=re.MULTILINE)[1:]


def check(text, folder):
    """Check a tour's output: the lines of each training, then a row each, and the sentence; return each row's bytes."""
    lines = text.splitlines()
    starts = [lines.index(name) for name in NAMES]
    assert starts == sorted(starts)
    for start in starts:
        steps = [line for line in lines[start + 1 :] if line.startswith("step ")][:STEPS]
        assert [int(line.split()[1].split("/")[0]) for line in steps] == list(range(1, STEPS + 1))
        assert all(re.search(r"loss \d+\.\d\d .*[\d.,]+ MB", line) for line in steps)
    last_looks = [re.findall(r"held-out (\d\.\d{3})", part)[-1] for part in _parts(text)]
    rows = [next(line for line in lines if line.startswith(f"{name} ")).rstrip() for name in NAMES]
    for row, last in zip(rows, last_looks, strict=True):
        assert re.search(rf" ([\d.]+|not reached) +[\d.,]+ [kM]?B +{re.escape(last)}$", row), row
    assert re.search(r"^To that held-out accuracy dense took [\d.]+ m?s and ended at 0\.", text, re.MULTILINE)
    page = (folder / "tour.html").read_text()
    assert all(f">{name}</th>" in page for name in NAMES)
    assert not [path for path in folder.iterdir() if path.name != "tour.html"]
    amounts = [re.search(r"([\d.,]+) ([kM]?)B ", row).groups() for row in rows]
    return [float(number.replace(",", "")) * {"": 1, "k": 1e3, "M": 1e6}[unit] for number, unit in amounts]


def check_done(done, folder):
    assert done.returncode == 0, done.stderr
    sent = check(done.stdout, folder)
    # A ring among four hosts: six bytes a parameter and step.
    assert sent[0] == pytest.approx(STEPS * 6 * PARAMETERS, rel=0.1)
    assert sent[2] <= sent[0]  # so few parameters may go out dense


def test_tour_of_one_rank_sends_nothing(one_thread, monkeypatch, tmp_path, capsys):
    """The trainings and what is said of them, without a start of four hosts."""
    pytest.importorskip("sklearn")
    from mpicomp.bench.commands import tour_ranks
    from mpicomp.bench.lab import simulated_links

    monkeypatch.setattr(simulated_links, "SimulatedLinks", lambda hosts, bandwidth: LocalWorld(1).transports[0])
    words = {"task": "digits", "steps": STEPS, "report": str(tmp_path / "tour.html")}
    assert tour_ranks.run(argparse.Namespace(**words, simulated=True, seed=0)) == 0
    text = capsys.readouterr().out
    assert check(text, tmp_path) == [0, 0, 0]
    assert "200mbit a host, simulated links" in text


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.timeout(300)
def test_tour_runs_on_hosts_of_an_ordinary_user(tmp_path):
    pytest.importorskip("torch")
    reason = reason_without_lab() or reason_without_user_namespaces()
    if reason is not None:
        pytest.skip(reason)
    done = call("--task", "digits", "--steps", str(STEPS), prefix=AS_A_USER, cwd=tmp_path)
    check_done(done, tmp_path)
    assert "simulated" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tour_says_why_links_are_simulated(tmp_path):
    pytest.importorskip("torch")
    if (reason := reason_without_user_namespaces()) is not None:
        pytest.skip(reason)
    done = call("--task", "digits", "--steps", str(STEPS), prefix=FORBIDDEN, cwd=tmp_path)
    check_done(done, tmp_path)
    assert "simulated links, since this machine has no emulated hosts: mpicomp lab needs user namesp" in done.stdout
    assert "200mbit a host, simulated links" in done.stdout


def test_too_few_steps_are_refused():
    done = call("--steps", "5")
    assert done.returncode == 2
    assert done.stderr == "mpicomp: tour: --steps must be an integer of at least 10, got 5\n"


def test_report_in_a_missing_folder_is_refused(tmp_path):
    done = call("--report", str(tmp_path / "none" / "tour.html"))
    assert done.returncode == 2
    assert "tour.html' cannot be written" in done.stderr
