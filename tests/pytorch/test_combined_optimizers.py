"""UpdateOptimizer around several optimizers: as each of them by itself, and one exchange for all."""

import copy

import pytest
import torch
from local_replicas import Updates, adam, loss_of, network, pair

import mpicomp
from mpicomp.errors import ConfigurationError, DisagreementError
from mpicomp.mpi import LocalWorld


def test_scheduler_sets_the_rates_of_all():
    ranks = Updates(2, pair)
    for number in range(3):
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in ranks.optimizers]
        ranks.step(number)
        for scheduler in schedulers:
            scheduler.step()
    for optimizer in ranks.optimizers:
        assert [member.param_groups[0]["lr"] for member in optimizer.optimizers] == [0.1 / 8, 0.02 / 8]
    with pytest.raises(ValueError, match="must support momentum or beta1"):  # which not all of them have
        torch.optim.lr_scheduler.OneCycleLR(ranks.optimizers[0], 0.1, total_steps=5)


@pytest.mark.parametrize(("place", "expected"), [(None, 1), (0, 0), (1, 1)])
def test_added_group_is_stepped_by_its_optimizer(place, expected):
    first = lambda model: pair(model[0])  # noqa: E731
    ranks, of_place = Updates(2, first, compressor="dense"), {} if place is None else {"optimizer": place}
    ranks.step(0)
    for model, optimizer in ranks.pairs:
        optimizer.add_param_group({"params": [model[2].weight], "lr": 0.05, **of_place})
        assert optimizer.optimizers[expected].param_groups[1] is optimizer.param_groups[2]
    before = ranks.models[0][2].weight.detach().clone()
    ranks.step(1)
    assert ("exp_avg" in ranks.optimizers[0].state[ranks.models[0][2].weight]) == bool(expected)
    assert not torch.equal(ranks.models[0][2].weight, before)
    states = ranks.states()  # groups are in the order in which they were added
    ranks.step(2)
    ranks_after = ranks.bits()
    ranks.load(states)
    ranks.step(2)
    assert ranks.bits() == ranks_after


@pytest.mark.parametrize("change", [lambda groups: groups.pop(), lambda groups: groups[0]["params"].pop()])
def test_state_of_other_groups_loads_nothing(change):
    ranks = Updates(1, pair)
    ranks.step(0)
    state = copy.deepcopy(ranks.optimizers[0].state_dict())
    ranks.step(1)
    before = copy.deepcopy(ranks.optimizers[0].state_dict())["state"]
    change(state["param_groups"])
    with pytest.raises(ValueError, match="loaded state dict has groups of"):
        ranks.optimizers[0].load_state_dict(state)
    after = ranks.optimizers[0].state_dict()["state"]
    assert all(torch.equal(after[key][name], value) for key in before for name, value in before[key].items())


def wrapped(model):
    alone = LocalWorld(1).transports[0]
    return mpicomp.torch.UpdateOptimizer(adam(model), model.named_parameters(), comm=alone)


BAD = {
    "the list of optimizers is empty": lambda model: [],
    "a torch optimizer is needed, got str at place 0": lambda model: ["adam"],
    "UpdatingAdamW at place 0 of a list must be a plain optimizer": lambda model: [wrapped(model)],
    r"of shape \(12, 9\) is in the optimizers at places 0 and 1": lambda model: [pair(model)[0], adam(model)],
    "LBFGS calls its closure many times": lambda model: [torch.optim.LBFGS(model.parameters())],
}


@pytest.mark.parametrize("match", BAD)
def test_bad_lists_are_refused(match):
    with pytest.raises(ConfigurationError, match=match):
        Updates(1, BAD[match])


OTHER = {
    "optimizer must be the same .*SGD [+] AdamW": lambda model: [
        pair(model)[0],
        torch.optim.Adam(pair(model)[1].param_groups[0]["params"], lr=0.02),
    ],
    "param_groups must be the same": lambda model: [
        *pair(model)[:1],
        torch.optim.AdamW([{"params": [model[0].bias]}, {"params": [model[2].bias]}], lr=0.02),
    ],
    r"param_groups\[0\]\['momentum'\] must be the same": lambda model: [
        torch.optim.SGD(pair(model)[0].param_groups[0]["params"], lr=0.1, momentum=0.8),
        pair(model)[1],
    ],
}


@pytest.mark.parametrize("match", OTHER)
def test_ranks_with_other_optimizers_are_refused(match):
    world, models = LocalWorld(2), [network(), network()]
    optimizers = [
        mpicomp.torch.UpdateOptimizer((OTHER[match] if rank else pair)(model), model.named_parameters(), comm=end)
        for rank, (model, end) in enumerate(zip(models, world.transports, strict=True))
    ]
    for rank, model in enumerate(models):
        loss_of(model, rank, 0).backward()
    with pytest.raises(DisagreementError, match=match):
        world.run([optimizer.rounds() for optimizer in optimizers])
