import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpicomp.bench.lab import launch
from mpicomp.bench.lab.lab_settings import (
    Change,
    LabError,
    Link,
    make_settings,
    parse_bandwidth,
    parse_latency,
    parse_loss,
    parse_schedule,
)


def make(**changes):
    values = {"hosts": 2, "ppn": 1, "bandwidth": "1gbit", "latency": "0us", "command": ["true"], **changes}
    return make_settings(**values)


def test_links_have_one_value_or_one_a_host():
    assert make(bandwidth="1gbit,100mbit").links == (Link(10**9, 0), Link(10**8, 0))
    assert make(hosts=1, latency="1ms").links == (Link(10**9, 10**6),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts": 0}, "--hosts must be between 1 and 200, got 0"),
        ({"ppn": 0}, "--ppn must be at least 1, got 0"),
        ({"bandwidth": "1gbit,1gbit,1gbit"}, "--bandwidth must have one value, or one for each of the 2 hosts, got 3"),
        ({"latency": "1ms,"}, "--latency must be a number"),
        ({"command": []}, "a command must follow"),
        ({"mpi": "lam"}, "--mpi must be mpich or openmpi, got 'lam'"),
        ({"schedule": "/nowhere"}, "--schedule must be a file"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(LabError) as raised:
        make(**changes)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("parse", "values"),
    [
        (parse_bandwidth, {"8000bit": 8000, "64kbit": 64_000, "2.5Gbit": 2_500_000_000, ".5gbit": 500_000_000}),
        (parse_latency, {"0us": 0, "0s": 0, "50us": 50_000, "1.5ms": 1_500_000, "700ns": 700, "2s": 2 * 10**9}),
        (parse_loss, {"0%": 0.0, "1%": 0.01, "0.25%": 0.0025, "50%": 0.5}),
    ],
)
def test_units_are_those_of_the_text(parse, values):
    assert {text: parse(text) for text in values} == values


BAD_BANDWIDTHS = ("", "1", "gbit", "1 gbit", "1gb", "-1gbit", "1gbps", "nanbit", "1e3mbit", "0gbit", "1kbit")


@pytest.mark.parametrize(
    ("parse", "texts", "message"),
    [
        (parse_bandwidth, BAD_BANDWIDTHS, "--bandwidth must be .*got"),
        (parse_latency, ["", "5", "0", "ms", "5 ms", "-5ms", "5min", "infs", "11s"], "--latency must be .*got"),
        (parse_loss, ["", "1", "-1%", "51%", "one%", "nan%"], "--loss must be .*got"),
    ],
)
def test_bad_units_are_refused(parse, texts, message):
    for text in texts:
        with pytest.raises(LabError, match=message):
            parse(text)


@pytest.mark.parametrize("text", ["0", "0mbit", "0.0gbit"])
def test_bandwidth_zero_is_a_link_that_is_down(text):
    assert parse_bandwidth(text, may_be_down=True) == 0


def test_comments_blank_lines_and_lists():
    text = "# all\n\n0 1gbit 0us\n2.5  1gbit,50mbit 1ms # slower\n"
    assert parse_schedule(text, hosts=2) == (
        Change(0.0, (Link(10**9, 0), Link(10**9, 0))),
        Change(2.5, (Link(10**9, 10**6), Link(50 * 10**6, 10**6))),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 1gbit", "line 1: a line must be 'seconds bandwidth latency', got '1 1gbit'"),
        ("\nx 1gbit 0us", "line 2: seconds must be a number of 0 or more, got 'x'"),
        ("nan 1gbit 0us", "seconds must be"),
        ("-1 1gbit 0us", "seconds must be"),
        ("2 1gbit 0us\n1 1gbit 0us", "line 2: seconds must not go back, got '1' after 2"),
        ("1 1gb 0us", "line 1: bandwidth must be a number with"),
        ("1 1gbit 5", "line 1: latency must be a number with"),
        ("1 1gbit,1gbit,1gbit 0us", "for each of the 2 hosts, got 3 values"),
        ("# nothing", "must have at least one line"),
    ],
)
def test_bad_line(text, message):
    with pytest.raises(LabError) as raised:
        parse_schedule(text, hosts=2)
    assert message in str(raised.value)


def test_file_without_text_is_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, message in (("none", "must be a file that can be read.*No such file"), ("binary", "not UTF-8")):
        with pytest.raises(LabError, match=message):
            make(schedule=str(tmp_path / name))


SETTINGS = make_settings(2, 2, "1gbit", "0us", ["program", "an argument"])


@pytest.mark.parametrize("nice", [3, 13])
def test_niceness_keeps_the_command_and_the_session_unchanged(nice, monkeypatch):
    group = Path("/proc/self/autogroup")
    before = group.read_text() if group.exists() else ""
    monkeypatch.setattr(os, "nice", lambda increment: 3)
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    line = launch.command_line("mpich", Path("/bin/mpiexec"), "/agent", SETTINGS, nice)
    wrapped = [*line[line.index("4") + 1 : -2], "printf", "%s|", "a  b", "c"]
    done = subprocess.run(wrapped, capture_output=True, text=True, check=True)
    assert done.stdout == "a  b|c|"
    monkeypatch.undo()
    assert (group.read_text() if group.exists() else "") == before


def test_environment_holds_mpi_to_eth0():
    caller = {"PATH": "/bin", "UCX_NET_DEVICES": "all", "UCX_TLS": "tcp", "OMPI_MCA_btl": "tcp,self"}
    mpich = launch.environment("mpich", 2, 1, caller)
    assert mpich["UCX_NET_DEVICES"] == "eth0"
    assert mpich["UCX_TLS"] == "tcp"
    assert mpich["PATH"] == f"{Path(sys.executable).parent}:/bin"
    openmpi = launch.environment("openmpi", 2, 2, caller)
    assert openmpi["OMPI_MCA_btl_tcp_if_include"] == "eth0"
    assert openmpi["OMPI_MCA_btl"] == "tcp,self"


def test_missing_launcher(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LabError, match="needs the MPI launcher next to Python"):
        launch.find_launcher()
