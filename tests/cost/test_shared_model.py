"""A cost model that only some ranks pass: that of rank 0 counts, and nobody waits."""

import json
import pathlib

import numpy as np
import pytest
from marks import slow
from networks import Link

import mpicomp
from mpicomp.cost import CostModel, Network
from mpicomp.errors import ConfigurationError
from mpicomp.mpi import LocalWorld

LINK = Link(1e-4, 1e9)
TOPK = mpicomp.TopK(ratio=0.05)
POLICIES = ["static", "schedule", "lgreco", {"id": "lgreco", "on": "gravac"}, "accordion", "flexible", "auto"]


def model(latency, hosts):
    network = Network(hosts)
    network.set_link("world", latency, 1e-9, 0.1)
    return CostModel(network)


def costs_on(ranks, size, hosts, latency=0.25):
    """Return each rank's ``cost=``: a model for these ranks, each another one, None for the others."""
    return [model(latency * (1 + rank), hosts) if rank in ranks else None for rank in range(size)]


def known(policy, cost):
    """Return the configuration of a policy with what is known."""
    return ({"id": policy} if isinstance(policy, str) else policy) | {"cost": cost}


class Local:
    """Reducers of ranks that live in one process."""

    def __init__(self, costs, collective="allgather", policy="static"):
        self.world = LocalWorld(len(costs), hosts=len(costs), network=LINK)
        self.reducers = [
            mpicomp.Reducer(TOPK, collective, known(policy, cost), comm=end)
            for end, cost in zip(self.world.transports, costs, strict=True)
        ]

    def step(self, names=("w",)):
        """Do a step; return the predicted seconds of a bucket on each rank."""
        arrays = [{name: np.full(500, 1.0 + rank, np.float32) for name in names} for rank in range(len(self.reducers))]
        self.world.run([reducer.rounds(array) for reducer, array in zip(self.reducers, arrays, strict=True)])
        return [reducer.last_step.buckets[0].predicted_s for reducer in self.reducers]


@pytest.mark.parametrize("size", [slow(2), 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("collective", [slow("allgather"), "auto"])
def test_cost_model_of_rank_0_counts_on_all_ranks(size, policy, collective):
    for ranks in ([0], range(size)):
        predicted = Local(costs_on(ranks, size, size), collective, policy).step()
        assert predicted == [predicted[0]] * size
        assert predicted[0] > 0.2  # by the first model, not by the network that there is


@pytest.mark.parametrize("size", [2, slow(3)])
@pytest.mark.parametrize("policy", POLICIES)
def test_cost_models_of_other_ranks_are_passed_over(size, policy):
    for ranks in ([1], range(1, size)):
        predicted = Local(costs_on(ranks, size, size), "allgather", policy).step()
        # These two choose by seconds, whatever the collective: they have measured the network that there is.
        assert predicted == [None] * size if policy not in ("auto", "flexible") else max(predicted) < 0.1
        assert max(Local(costs_on(ranks, size, size), "auto", policy).step()) < 0.1


def test_cost_model_is_shared_again_when_buckets_change():
    ranks = Local(costs_on([0], 3, 3))
    first = ranks.step()
    again = ranks.step(("w", "v"))
    assert again == [again[0]] * 3
    assert again[0] > 0.2
    assert first == [first[0]] * 3
    other = Local(costs_on([1], 3, 3))
    assert [other.step(), other.step(("w", "v"))] == [[None] * 3] * 2


WHOLE = json.dumps(model(1e-4, 2).to_json())
DAMAGE = {
    "empty": b"",
    "cut": WHOLE[: len(WHOLE) // 2].encode(),
    "another": b'{"schema": 99}',
    "a list": b"[1]",
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "huge": WHOLE.replace('"hosts": 2', f'"hosts": 1{"0" * 400}').encode(),
    "huger": WHOLE.replace('"state": [', f'"state": [1{"0" * 400}, ').encode(),
    "not finite": WHOLE.replace('"hosts": 2', '"hosts": NaN').encode(),
}
WRONG = [*DAMAGE, "missing", ".", 17, b"cost.json"]  # files, a folder, and no names of files


def written(folder, wrong):
    """Return the setting of a cost model that is none."""
    if wrong in DAMAGE:
        (folder / wrong).write_bytes(DAMAGE[wrong])
    return str(folder / wrong) if isinstance(wrong, str) else wrong


@pytest.mark.parametrize("collective", [slow("allgather"), "auto"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_cost_model_is_one_error_on_all_ranks(tmp_path, collective, wrong):
    cost = written(tmp_path, wrong)
    with pytest.raises(ConfigurationError, match=r"^cost: ") as caught:
        Local([cost, None, None], collective).step()
    assert caught.value.__notes__ == ["3 of 3 ranks raised"]
    for costs in ([None, cost, None], [model(0.25, 3), cost, cost]):
        predicted = Local(costs, collective).step()
        assert predicted == [predicted[0]] * 3


def test_cost_model_is_read_from_a_path_or_a_name(tmp_path):
    model(0.25, 2).save(str(tmp_path / "cost.json"))
    for name in (str, pathlib.Path):
        assert min(Local([name(tmp_path / "cost.json"), None]).step()) > 0.2


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("policy", "collective"), [("static", "allgather"), ("schedule", "auto")])
def test_cost_model_of_rank_0_counts_over_mpi(comm, collective, policy):
    from mpicomp.mpi.comm import MPITransport

    for ranks in ([0], [1], range(comm.size), []):
        transport = MPITransport(comm)
        cost = costs_on(ranks, comm.size, transport.group.hosts)[comm.rank]
        reducer = mpicomp.Reducer(TOPK, collective, known(policy, cost), comm=transport)
        reducer.reduce({"w": np.full(500, 1.0 + comm.rank, np.float32)})
        predicted = comm.allgather(reducer.last_step.buckets[0].predicted_s)
        assert predicted == [predicted[0]] * comm.size
        if 0 in ranks:
            assert predicted[0] > 0.2
        elif collective == "allgather":
            assert predicted[0] is None
        reducer.close()
        transport.close()
