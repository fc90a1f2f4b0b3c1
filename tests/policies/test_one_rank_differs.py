"""What only some ranks have or meet: it is measured to all of them before any waits for another."""

import importlib
import importlib.util

import numpy as np
import pytest
from networks import Link
from worlds import Ranks

import mpicomp
from mpicomp.errors import ConfigurationError
from mpicomp.mpi import LocalWorld


def hide_torch(monkeypatch):
    """Have this process find no torch."""
    find = importlib.util.find_spec

    def find_others(name, *arguments):
        return None if name.partition(".")[0] == "torch" else find(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)
    monkeypatch.setattr("mpicomp.systems.lgc.compressor.find_spec", find_others)


@pytest.mark.parametrize("collective", ["auto", "learned"])
def test_what_is_not_installed_is_said_when_a_reducer_is_made(monkeypatch, collective):
    """Later only the rank that lacks it would raise, in the middle of a step."""
    hide_torch(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"trained with torch"):
        mpicomp.Reducer("lgc", collective, "static", comm=LocalWorld(2).transports[0])


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("collective", ["auto", "learned"])
def test_what_one_rank_lacks_is_one_error_on_all(comm, monkeypatch, collective):
    if comm.rank == comm.size - 1:
        hide_torch(monkeypatch)
    with pytest.raises(ConfigurationError, match=rf"trained with torch.*\(on rank {comm.size - 1}\)"):
        mpicomp.Reducer("lgc", collective, "static", comm=comm)


def test_gradient_near_overflow_on_one_rank_harms_no_other():
    policy = {"id": "lgreco", "first": 3, "every": 3}
    ranks = Ranks(2, mpicomp.PowerSGD(rank=2), "low-rank", policy, nonfinite="skip", network=Link(1e-5, 1e9))
    random = np.random.default_rng(0)
    for step in range(12):
        gradients = [{"w": random.standard_normal((40, 30)).astype(np.float32)} for _ in range(2)]
        if step in (1, 5):
            gradients[1]["w"] = np.sign(gradients[1]["w"]) * np.float32(3.3e38)
        means = ranks.reduce(gradients)
        assert (means[0]["w"] == means[1]["w"]).all()
        assert np.isfinite(means[0]["w"]).all()


PROBES = [("0", None), (None, "0"), ("1", "0"), ("0", "1"), ("1", "nonsense"), (None, "")]


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize(
    ("first", "others", "collective"),
    [(*probes, ("auto", "allgather")[number % 2]) for number, probes in enumerate(PROBES)],
)
def test_whether_to_probe_is_what_rank_0_says(comm, monkeypatch, collective, first, others):
    from mpicomp.job.doctor.probes import measure

    mine = first if comm.rank == 0 else others
    if mine is None:
        monkeypatch.delenv("MPICOMP_PROBE", raising=False)
    else:
        monkeypatch.setenv("MPICOMP_PROBE", mine)
    reducer = mpicomp.Reducer("topk", collective, comm=comm)
    for _ in range(3):
        reducer.reduce({"w": np.ones(300, np.float32)})
    reducer.close()
    link, _ = measure(comm)
    assert (link is None) == (first == "0")


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("wrong", ["2", "nonsense"])
def test_nonsense_on_rank_0_is_one_error_on_all(comm, monkeypatch, wrong):
    monkeypatch.setattr(importlib.import_module("mpicomp.cost.calibrate"), "_cached", {})
    if comm.rank == 0:
        monkeypatch.setenv("MPICOMP_PROBE", wrong)
    reducer = mpicomp.Reducer("topk", "auto", comm=comm)
    with pytest.raises(ConfigurationError, match="MPICOMP_PROBE must be 0 or 1"):
        reducer.reduce({"w": np.ones(300, np.float32)})
    reducer.close()
