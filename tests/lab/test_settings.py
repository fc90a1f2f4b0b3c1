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
    format_bandwidth,
    make_settings,
    parse_bandwidth,
    parse_latency,
    parse_loss,
    parse_schedule,
    read_schedule,
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
        ({"hosts": 201}, "--hosts must be"),
        ({"ppn": 0}, "--ppn must be at least 1, got 0"),
        ({"bandwidth": "1gbit,1gbit,1gbit"}, "--bandwidth must have one value, or one for each of the 2 hosts, got 3"),
        ({"latency": "1ms,"}, "--latency must be a number"),
        ({"command": []}, "a command must follow"),
        ({"command": [""]}, "a command must follow"),
        ({"mpi": "lam"}, "--mpi must be mpich or openmpi, got 'lam'"),
        ({"schedule": "/nowhere"}, "--schedule must be a file"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(LabError) as raised:
        make(**changes)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "bits"),
    [("8000bit", 8000), ("1kbit", None), ("64kbit", 64_000), ("2.5Gbit", 2_500_000_000), (".5gbit", 500_000_000)],
)
def test_bandwidth(text, bits):
    if bits is None:
        with pytest.raises(LabError, match="between 8kbit and 1000gbit"):
            parse_bandwidth(text)
    else:
        assert parse_bandwidth(text) == bits
        assert parse_bandwidth(format_bandwidth(bits)) == bits


@pytest.mark.parametrize("text", ["", "1", "gbit", "1 gbit", "1gb", "-1gbit", "1gbps", "nanbit", "1e3mbit", "0gbit"])
def test_bad_bandwidth(text):
    with pytest.raises(LabError, match=r"--bandwidth must be .*got"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [("0us", 0), ("0s", 0), ("50us", 50_000), ("1.5ms", 1_500_000), ("700ns", 700), ("2s", 2 * 10**9)],
)
def test_latency(text, nanoseconds):
    assert parse_latency(text) == nanoseconds


@pytest.mark.parametrize("text", ["", "5", "0", "ms", "5 ms", "-5ms", "5min", "infs", "11s"])
def test_bad_latency(text):
    with pytest.raises(LabError, match=r"--latency must be .*got"):
        parse_latency(text)


@pytest.mark.parametrize(("text", "share"), [("0%", 0.0), ("1%", 0.01), ("0.25%", 0.0025), ("50%", 0.5)])
def test_loss(text, share):
    assert parse_loss(text) == share


@pytest.mark.parametrize("text", ["", "1", "-1%", "51%", "one%", "nan%"])
def test_bad_loss(text):
    with pytest.raises(LabError, match=r"--loss must be a percentage from 0% to 50%, got"):
        parse_loss(text)


@pytest.mark.parametrize("text", ["0", "0mbit", "0.0gbit"])
def test_bandwidth_zero_is_a_link_that_is_down(text):
    assert parse_bandwidth(text, may_be_down=True) == 0


def test_latency_message_names_rule_value_and_remedy():
    with pytest.raises(LabError, match=r"^--latency must be a number with ns, us, ms or s, got '5'; write"):
        parse_latency("5")


def test_comments_blank_lines_and_lists():
    text = "# all\n\n0 1gbit 0us\n2.5  1gbit,50mbit 1ms # slower\n"
    assert parse_schedule(text, hosts=2) == (
        Change(0.0, (Link(10**9, 0), Link(10**9, 0))),
        Change(2.5, (Link(10**9, 10**6), Link(50 * 10**6, 10**6))),
    )


def test_schedule_may_take_a_link_down():
    assert parse_schedule("1 0,1gbit 1ms", hosts=2) == (Change(1.0, (Link(0, 10**6), Link(10**9, 10**6))),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 1gbit", "line 1: a line must be 'seconds bandwidth latency', got '1 1gbit'"),
        ("\nx 1gbit 0us", "line 2: seconds must be a number of 0 or more, got 'x'"),
        ("nan 1gbit 0us", "seconds must be"),
        ("inf 1gbit 0us", "seconds must be"),
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


def test_missing_file(tmp_path):
    with pytest.raises(LabError, match=r"--schedule must be a file that can be read.*No such file"):
        read_schedule(tmp_path / "none", hosts=1)


def test_binary_file(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(LabError, match="not UTF-8"):
        read_schedule(path, hosts=1)


SETTINGS = make_settings(2, 2, "1gbit", "0us", ["program", "an argument"])


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_command_line_ends_with_the_command(mpi, monkeypatch):
    monkeypatch.setattr(os, "nice", lambda increment: 0)
    line = launch.command_line(mpi, Path("/bin/mpiexec"), "/agent", SETTINGS)
    assert line[0] == "/bin/mpiexec"
    assert line[-2:] == ["program", "an argument"]
    assert "4" in line
    assert "/agent" in line


def test_niceness_keeps_the_command_as_it_is(monkeypatch):
    monkeypatch.setattr(os, "nice", lambda increment: 3)
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    line = launch.command_line("mpich", Path("/bin/mpiexec"), "/agent", SETTINGS)
    wrapped = [*line[line.index("/bin/sh") : -2], "printf", "%s|", "a  b", "c"]
    done = subprocess.run(wrapped, capture_output=True, text=True, check=True)
    assert done.stdout == "a  b|c|"


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
