"""Replicas that drift are found, and the parameter and the ranks are named."""

from functools import partial

import pytest
import torch
from replicas import close_at_end, descent

import mpicomp
from mpicomp.errors import DisagreementError
from mpicomp.mpi import LocalWorld
from mpicomp.torch.checks import Fingerprint


def compare(replicas_at, every, times, size):
    """Compare replicas, which are a function of the time; return the first time with an error, and the error."""
    world, prints = LocalWorld(size), [Fingerprint(every, "X") for _ in range(size)]
    groups = [end.group for end in world.transports]
    for time in range(times):
        members = zip(prints, replicas_at(time), groups, strict=True)
        try:
            world.run([fingerprint.compare(tensors, group) for fingerprint, tensors, group in members])
        except DisagreementError as error:
            return time, str(error)
    return None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64])
def test_any_bit_that_differs_is_found(dtype):
    torch.manual_seed(0)
    size = 3
    start = {"a": torch.randn(5, 3).to(dtype), "b": torch.randn(40).to(dtype).reshape(8, 5).T}
    for bit in (0, 3, 7):
        replicas = [{name: values.clone() for name, values in start.items()} for _ in range(size)]
        assert compare(lambda _, replicas=replicas: replicas, 1, 3, size) is None
        flat = replicas[-1]["b"].contiguous().view(torch.uint8).clone()
        flat.view(-1)[11] ^= 1 << bit
        replicas[-1]["b"] = flat.view(dtype).reshape(5, 8)
        time, words = compare(lambda _, replicas=replicas: replicas, 1, 2, size)
        assert time == 1  # after the first step
        assert words.startswith("X: parameter 'b' has other values on rank 2 than on rank 0; replicas have")
        replicas[1] = replicas[2]
        assert "'b' has other values on ranks 1, 2 than" in compare(lambda _, replicas=replicas: replicas, 2, 2, 3)[1]


@pytest.mark.parametrize(("every", "steps"), [(5, [1, 2, 4, 5, 10, 15, 20]), (1, list(range(1, 21))), (0, [])])
def test_comparisons_follow_steps_1_2_4_8_and_then_every_nth(every, steps):
    def replicas_at(time, drifting_from):
        return [{"w": torch.full((3,), float(rank and time >= drifting_from))} for rank in range(2)]

    found = [compare(partial(replicas_at, drifting_from=first), every, 21, 2) for first in range(1, 21)]
    compared = [time for time, _ in filter(None, found)]
    assert sorted(set(compared)) == steps


def replicas_of(size):
    torch.manual_seed(1)
    first = torch.nn.Linear(4, 3)
    models = [torch.nn.Linear(4, 3) for _ in range(size)]
    for model in models:
        model.load_state_dict(first.state_dict())
    return models


def backward(model, rank):
    model.zero_grad()
    model(torch.full((1, 4), rank + 1.0)).sum().backward()


WORDS = "parameter 'bias' has other values on rank 1 than on rank 0; replicas have drifted"


def test_shared_parameters_are_compared():
    """A parameter and the shared one change on a rank, as memory that fails would have it."""
    world, models = LocalWorld(2), replicas_of(2)
    optimizers = [
        mpicomp.torch.UpdateOptimizer(descent(model), model, compressor="topk", comm=end, compare_every=3)
        for model, end in zip(models, world.transports, strict=True)
    ]

    def step():
        for rank, model in enumerate(models):
            backward(model, rank)
        world.run([optimizer.rounds() for optimizer in optimizers])

    for _ in range(4):
        step()
    with torch.no_grad():
        for drifted in (models[1].bias, optimizers[1].shared()["bias"]):
            drifted[2] += 1e-3
    step()
    step()  # they were compared after the third step, and will be after the sixth one
    with pytest.raises(DisagreementError, match=WORDS):
        step()


@pytest.mark.mpi(min_size=2)
def test_replicas_are_compared(comm):
    [model], rank = replicas_of(1), comm.rank
    settings = {"compressor": "topk", "comm": comm, "compare_every": 3}
    optimizer = close_at_end(mpicomp.torch.DistributedOptimizer(descent(model), model, **settings))
    for number in range(1, 7):
        backward(model, rank)
        optimizer.step()
        if number == 4 and rank == 1:
            with torch.no_grad():
                model.bias[2] += 1e-3
    backward(model, rank)
    with pytest.raises(DisagreementError, match=WORDS):
        optimizer.step()
