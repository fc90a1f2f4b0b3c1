"""Replicas that drift apart are found, and the parameter and the ranks are named."""

import pytest

import mpicomp
from mpicomp.errors import ConfigurationError, DisagreementError
from mpicomp.torch.replica_checks import Fingerprint
from mpicomp.transport import LocalWorld

torch = pytest.importorskip("torch")


def looks(world, replicas, every, times):
    """Compare so many times; return the errors of all ranks at the time when there are some, and that time."""
    prints = [Fingerprint(every, "X") for _ in replicas]
    groups = [end.group for end in world.transports]
    for time in range(times):
        try:
            world.run([own.compare(ours, group) for own, ours, group in zip(prints, replicas, groups, strict=True)])
        except DisagreementError as error:
            return time, str(error)
    return None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_bit_that_differs_is_found(dtype, size):
    torch.manual_seed(0)
    start = {"a": torch.randn(5, 3).to(dtype), "b": torch.randn(40).to(dtype).reshape(8, 5).T}
    for bit in (0, 3, 7):
        replicas = [{name: own.clone() for name, own in start.items()} for _ in range(size)]
        assert looks(LocalWorld(size), replicas, 1, 3) is None
        flat = replicas[-1]["b"].contiguous().view(torch.uint8).clone()
        flat.view(-1)[11] ^= 1 << bit
        replicas[-1]["b"] = flat.view(dtype).reshape(5, 8)
        time, words = looks(LocalWorld(size), replicas, 1, 2)
        assert time == 1  # after the first step
        assert words.startswith(f"X: parameter 'b' has other values on rank {size - 1} than on rank 0; replicas have")


def test_all_ranks_that_differ_are_named():
    replicas = [{"w": torch.full((3,), float(rank in (1, 3)))} for rank in range(4)]
    assert "'w' has other values on ranks 1, 3 than on rank 0" in looks(LocalWorld(4), replicas, 2, 2)[1]


@pytest.mark.parametrize(("every", "steps"), [(5, [1, 2, 4, 5, 10, 15, 20]), (1, list(range(1, 21))), (0, [])])
def test_parameters_are_compared_after_1_2_4_8_steps_and_then_every_so_many(every, steps):
    compared = []
    for drifting_from in range(1, 21):
        world, prints = LocalWorld(2), [Fingerprint(every, "X") for _ in range(2)]
        for step in range(21):
            replicas = [{"w": torch.full((3,), float(rank and step >= drifting_from))} for rank in range(2)]
            try:
                world.run(
                    [
                        own.compare(ours, end.group)
                        for own, ours, end in zip(prints, replicas, world.transports, strict=True)
                    ]
                )
            except DisagreementError:
                compared.append(step)
                break
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


WORDS = "parameter 'bias' has other values on rank 1 than on rank 0; replicas have drifted apart"


def test_shared_parameters_are_compared():
    """The shared parameter and the own one change on a rank, as memory that fails would have it."""
    world, models = LocalWorld(2), replicas_of(2)
    optimizers = [
        mpicomp.torch.UpdateOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            compressor="topk",
            comm=end,
            compare_every=3,
        )
        for model, end in zip(models, world.transports, strict=True)
    ]

    def step():
        for rank, model in enumerate(models):
            backward(model, rank)
        world.run([own.rounds() for own in optimizers])

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
@pytest.mark.parametrize("compressor", ["dense", "topk"])
def test_replicas_are_compared(comm, compressor):
    [model], rank = replicas_of(1), comm.rank
    optimizer = mpicomp.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compressor=compressor,
        comm=comm,
        compare_every=3,
    )
    for number in range(1, 7):
        backward(model, rank)
        optimizer.step()
        if number == 4 and rank == 1:
            with torch.no_grad():
                model.bias[2] += 1e-3
    backward(model, rank)
    with pytest.raises(DisagreementError, match=WORDS):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("wrap", [mpicomp.torch.DistributedOptimizer, mpicomp.torch.UpdateOptimizer])
@pytest.mark.parametrize("every", [-1, 1.5, None, True])
def test_a_setting_that_cannot_be(wrap, every):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match="compare_every must be an integer of at least 0"):
        wrap(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            comm=LocalWorld(1).transports[0],
            compare_every=every,
        )
