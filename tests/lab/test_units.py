import pytest
from mpicomp.bench.lab.units import LabError, format_bandwidth, parse_bandwidth, parse_latency, parse_loss


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
