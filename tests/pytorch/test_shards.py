"""Shards of `fully_shard` are exchanged between replicas as whole parameters are between ranks."""

import numpy as np
import pytest
import torch
from replicas import Words, adam, batch, network, square, words_loss
from sharded_models import Hybrid, assert_alike, residuals, shard, shards
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, distribute_tensor

import mpicomp
from mpicomp.errors import ConfigurationError, DisagreementError, NonFiniteError
from mpicomp.torch.shards import local_of

pytestmark = pytest.mark.mpi(min_size=4, max_size=4)


class Tied(torch.nn.Module):
    """A tied matrix, a bias of three rows, and a head of one, which leaves the second shard empty."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.inner, self.again = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.again.weight = self.inner.weight
        self.narrow, self.head = torch.nn.Linear(6, 3), torch.nn.Linear(3, 1)
        self.narrow.bias.requires_grad_(False)

    def forward(self, inputs):
        return self.head(torch.tanh(self.narrow(torch.tanh(self.again(torch.tanh(self.inner(inputs)))))))


@pytest.mark.parametrize("overlap", [True, False])
def test_dense_training_equals_one_process(comm, overlap):
    with shards(comm) as mesh:
        hybrid = Hybrid(comm, mesh, overlap=overlap, bucket_bytes=64, compare_every=0)
        hybrid.run(range(6))
        assert hybrid.optimizer.overlaps is overlap
        hybrid.check()
        record = hybrid.optimizer.reducer.last_step  # of its rank's half of the model, and a header for each bucket
        local = sum(parameter.to_local().numel() for parameter in hybrid.model.parameters())
        assert 2 * local == sum(parameter.numel() for parameter in hybrid.model.parameters())
        assert 0 <= record.sent_bytes - 4 * local <= 16 * len(record.buckets)
        assert record.overhead_bytes == 0


class Optional(torch.nn.Module):
    """A layer that one replica uses, but for the first step."""

    def __init__(self):
        super().__init__()
        self.trunk, self.extra = torch.nn.Linear(6, 4), torch.nn.Linear(4, 4)

    def forward(self, inputs, extra):
        hidden = self.trunk(inputs)
        return self.extra(hidden) if extra else hidden


def optional_loss(model, step, rank):
    return model(batch(step, rank), bool(step) and rank >= 2).square().mean()


def image_loss(model, step, rank):
    return model(batch(step, rank, columns=48).view(4, 3, 4, 4)).square().mean()


def convolutions():
    layers = torch.nn.Conv2d(3, 5, 3), torch.nn.GroupNorm(1, 5), torch.nn.Flatten(), torch.nn.Linear(20, 2)
    return torch.nn.Sequential(*layers)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
TRAININGS = {
    "uneven": (Tied, {"sharding": {"whole": True}}),
    "one row": (lambda: torch.nn.Sequential(torch.nn.Linear(6, 1)), {"overlap": True}),
    "convolutions": (convolutions, {"loss": image_loss}),
    "embedding": (lambda: Words(sparse=False, words=51), {"loss": words_loss}),
    "unused layer": (Optional, {"loss": optional_loss}),
    "bfloat16": (network, {"sharding": {"mp_policy": BF16}}),
    "offloaded": (network, {"sharding": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, "overlap": True}),
}


@pytest.mark.parametrize(("make", "settings"), TRAININGS.values(), ids=TRAININGS)
def test_shards_of_every_kind_equal_one_process(comm, make, settings):
    with shards(comm) as mesh:
        torch.manual_seed(6)
        hybrid = Hybrid(comm, mesh, make(), **settings)
        hybrid.run(range(4))
        hybrid.check(most=2e-2 if "mp_policy" in settings.get("sharding", {}) else 1e-6)
        assert {parameter.dtype for parameter in hybrid.model.parameters()} == {torch.float32}
        is_empty = any(not parameter.to_local().numel() for parameter in hybrid.model.parameters())
        assert is_empty == (comm.rank % 2 == 1) or make is not Tied


@pytest.mark.parametrize("hosts", [[[0, 2], [1, 3]], [[1, 2], [0, 3]]], ids=str)
def test_replicas_are_found_for_any_order_of_ranks(comm, hosts):
    with shards(comm, hosts) as mesh:
        hybrid = Hybrid(comm, mesh)
        hybrid.run(range(2))
        hybrid.check()
        world = comm.Split(0, -comm.rank)  # torch counts ranks the other way round
        same = mpicomp.torch.replicas(mesh, world)
        assert sorted(same.allgather(comm.rank)) == sorted(row[mesh.get_local_rank()] for row in hosts)


def bytes_of(record):
    return record.sent_bytes, record.overhead_bytes


@pytest.mark.parametrize("by_fsdp", [True, False])
def test_accumulated_gradients_are_exchanged_once(comm, by_fsdp):
    """With one exchange for four batches parameters are those of their sum, for the bytes of one."""
    with shards(comm) as mesh:
        hybrid = Hybrid(comm, mesh, overlap=True, compare_every=0)
        hybrid.run([0, 1])
        before = bytes_of(hybrid.optimizer.reducer.last_step)
        hybrid.optimizer.zero_grad()
        for part in range(4):
            last = part == 3
            if by_fsdp:
                hybrid.model.set_requires_gradient_sync(last)
                square(hybrid.model, part, comm.rank).backward()
            elif last:
                square(hybrid.model, part, comm.rank).backward()
            else:
                with hybrid.optimizer.accumulate():
                    square(hybrid.model, part, comm.rank).backward()
        hybrid.optimizer.step()
        hybrid.reference.step(lambda model, step, rank: [square(model, part, rank) for part in range(4)], 1)
        hybrid.check()
        assert bytes_of(hybrid.optimizer.reducer.last_step) == before


@pytest.mark.parametrize(
    ("compressor", "collective"), [(mpicomp.TopK(ratio=0.1), "allgather"), ("onebit", "two-phase")], ids=str
)
def test_overlapped_exchange_of_shards_changes_no_bit(comm, compressor, collective):
    with shards(comm) as mesh:
        runs = [
            Hybrid(comm, mesh, compressor=compressor, collective=collective, warmup=0, overlap=overlap, bucket_bytes=64)
            for overlap in (False, True)
        ]
        for hybrid in runs:
            hybrid.run(range(5))
            assert_alike(hybrid.model, hybrid.replicas)
        first, second = ({name: p.to_local().tolist() for name, p in run.model.named_parameters()} for run in runs)
        assert first == second
        first, second = ({name: r.tolist() for name, r in residuals(run.optimizer).items()} for run in runs)
        assert first == second


def test_nothing_of_a_shard_is_lost(comm):
    """Gradients and residuals before are means and residuals after, summed over replicas."""
    with shards(comm) as mesh:
        hybrid = Hybrid(comm, mesh, compressor=mpicomp.TopK(ratio=0.1), collective="allgather", warmup=0, overlap=False)
        for step in range(4):
            hybrid.backward(step)
            gradients = {name: p.grad.to_local().double() for name, p in hybrid.model.named_parameters()}
            before = residuals(hybrid.optimizer) if step else {}
            hybrid.optimizer.step()
            after = residuals(hybrid.optimizer)
            for name, parameter in hybrid.model.named_parameters():
                total = hybrid.replicas.allreduce((gradients[name] + before.get(name, 0) - after[name]).numpy())
                mean = parameter.grad.to_local().double().numpy()
                np.testing.assert_allclose(total, 2 * mean, rtol=1e-5, atol=1e-7)


def state_of(hybrid):
    parameters = {name: parameter.to_local().tolist() for name, parameter in hybrid.model.named_parameters()}
    return parameters, {name: residual.tolist() for name, residual in residuals(hybrid.optimizer).items()}


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_all_shards_skip_what_one_of_them_cannot_apply(comm, policy):
    """A NaN in one shard on one host undoes the step of all four ranks, with their residuals."""
    with shards(comm) as mesh:
        hybrid = Hybrid(
            comm, mesh, compressor=mpicomp.TopK(ratio=0.1), collective="allgather", warmup=0, overlap=False,
            nonfinite=policy, make=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        )  # fmt: skip
        hybrid.run(range(2))
        before = state_of(hybrid)
        hybrid.backward(2)
        if comm.rank == 0:
            hybrid.model[2].weight.grad.to_local()[1, 1] = torch.nan
        if policy == "raise":
            with pytest.raises(NonFiniteError, match="got NaN or infinity"):
                hybrid.optimizer.step()
        else:
            hybrid.optimizer.step()
            assert hybrid.optimizer.reducer.last_step.skipped
        assert state_of(hybrid) == before
        hybrid.run(range(3, 5))
        assert_alike(hybrid.model, hybrid.replicas)


def test_error_of_one_shard_is_raised_for_all(comm):
    """A learning rate that differs on one rank is found among its replicas, and all four ranks raise it."""
    with shards(comm) as mesh:
        hybrid = Hybrid(comm, mesh)
        hybrid.run([0])
        if comm.rank == 2:
            hybrid.optimizer.param_groups[0]["lr"] = 0.2
        hybrid.backward(1)
        with pytest.raises(DisagreementError, match="lr") as raised:
            hybrid.optimizer.step()
        assert str(raised.value).endswith("of another shard)") == (comm.rank % 2 == 1)


def test_parameters_of_replicas_become_the_first_ones(comm):
    with shards(comm) as mesh:
        torch.manual_seed(comm.rank // 2)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
        expected = {name: value.tolist() for name, value in model.state_dict().items()}
        hybrid = Hybrid(comm, mesh, model)
        mpicomp.torch.broadcast_parameters(hybrid.model, comm=hybrid.replicas)
        expected = comm.bcast(expected)
        held = {name: parameter.full_tensor().tolist() for name, parameter in hybrid.model.named_parameters()}
        assert held == expected
        with pytest.raises(DisagreementError, match=r"rows 0 to 3 of 5"):
            mpicomp.torch.broadcast_parameters(hybrid.model, comm=comm)


def held_states(model, optimizer):
    """Return the local values of all states, by name, and which of them are sharded as their parameter."""
    return {
        (name, key): (local_of(value).tolist(), type(value) is type(parameter.data))
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def test_states_of_replicas_become_the_first_ones(comm):
    with shards(comm) as mesh:
        model = shard(Tied(), mesh, whole=True)
        optimizer, replicas = adam(model), mpicomp.torch.replicas(model)
        if comm.rank < 2:  # the first replica has resumed, the other one is new
            for step in range(3):
                square(model, step, comm.rank).backward()
                optimizer.step()
        expected = replicas.bcast(held_states(model, optimizer))
        assert {is_sharded for (_, key), (_, is_sharded) in expected.items() if key == "exp_avg"} == {True}
        mpicomp.torch.broadcast_optimizer_state(optimizer, comm=replicas)
        mpicomp.torch.broadcast_parameters(model, comm=replicas)
        assert held_states(model, optimizer) == expected
        optimizer.zero_grad()
        square(model, 3, comm.rank % 2).backward()
        optimizer.step()
        assert_alike(model, replicas)
        with pytest.raises(DisagreementError, match="rows 0 to 3 of 6"):
            mpicomp.torch.broadcast_optimizer_state(optimizer, comm=comm)
        state = optimizer.state[model.head.weight]
        state["exp_avg"] = distribute_tensor(torch.ones(1, 3), mesh, [Replicate()])
        with pytest.raises(
            ConfigurationError, match=r"sharded as their parameter or not at all, got one that is a DTensor"
        ):
            mpicomp.torch.broadcast_optimizer_state(optimizer, comm=replicas)
