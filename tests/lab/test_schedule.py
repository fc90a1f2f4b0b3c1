import pytest
from mpicomp.bench.lab.settings import Change, Link, parse_schedule, read_schedule
from mpicomp.bench.lab.units import LabError


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
