import pytest
from mpicomp.bench.lab.settings import Link, make_settings
from mpicomp.bench.lab.units import LabError


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
