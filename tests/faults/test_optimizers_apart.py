"""Ranks whose optimizers or parameters differ: found in the step in which it happens, or soon after, on all ranks."""

import pytest

from mpicomp.errors import DisagreementError

torch = pytest.importorskip("torch")

from replicas import Reference, assert_replicas, assert_same, distribute, network, sgd, square  # noqa: E402
from script_shapes import bits  # noqa: E402

import mpicomp.torch  # noqa: E402

torch.set_num_threads(1)

FAULT_STEP = 3


def _rate(model, optimizer):
    optimizer.param_groups[0]["lr"] *= 2


def _rate_of_the_last_group(model, optimizer):
    optimizer.param_groups[-1]["lr"] *= 2


def _decay(model, optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.1


def _momentum(model, optimizer):
    optimizer.param_groups[0]["momentum"] = 0.5


def _lost_state(model, optimizer):
    optimizer.state.clear()


def _frozen_parameter(model, optimizer):
    model[0].weight.requires_grad_(False)


SETTING = "must be the same on all ranks"
PARAMETER = r"parameter '.*' has other values on rank"
FAULTS = {
    _rate: (1, rf"param_groups\[0\]\['lr'\] {SETTING}, got 0.1 on rank 0 and 0.2 on rank"),
    _rate_of_the_last_group: (1, rf"param_groups\[1\]\['lr'\] {SETTING}"),
    _decay: (1, rf"param_groups\[0\]\['weight_decay'\] {SETTING}"),
    _momentum: (1, rf"param_groups\[0\]\['momentum'\] {SETTING}"),
    _frozen_parameter: (1, "'0.weight' is on rank 0 but not on rank"),
    _lost_state: (2, PARAMETER),
}
"""What happens to the last rank alone: within how many steps it is found, and in which words."""


def _train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        square(model, step, rank).backward()
        optimizer.step()


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_of_one_optimizer_is_one_error(comm, fault):
    model = network()
    groups = [{"params": model[:3].parameters()}, {"params": model[3:].parameters()}]
    optimizer = distribute(model, comm, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    _train(model, optimizer, comm.rank, range(FAULT_STEP))
    if comm.rank == comm.size - 1:
        fault(model, optimizer)
    most_steps, words = FAULTS[fault]
    before = bits(model)
    with pytest.raises(DisagreementError, match=words) as raised:
        _train(model, optimizer, comm.rank, range(FAULT_STEP, FAULT_STEP + most_steps))
    assert len(set(comm.allgather(str(raised.value)))) == 1
    assert most_steps > 1 or bits(model) == before
    optimizer.close()


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize(
    "make",
    [
        lambda model, comm: mpicomp.torch.OneBitAdam(model.named_parameters(), lr=0.01, comm=comm),
        lambda model, comm: mpicomp.torch.SketchedAMSGrad(model.named_parameters(), lr=0.01, comm=comm),
        lambda model, comm: mpicomp.torch.UpdateOptimizer(sgd(model), model.named_parameters(), comm=comm),
    ],
    ids=["OneBitAdam", "SketchedAMSGrad", "UpdateOptimizer"],
)
def test_rate_of_one_rank_is_one_error(comm, make):
    model = network()
    optimizer = make(model, comm)
    _train(model, optimizer, comm.rank, range(FAULT_STEP))
    optimizer.param_groups[0]["lr"] += 0.01 * (comm.rank == comm.size - 1)
    with pytest.raises(DisagreementError, match=rf"param_groups\[0\]\['lr'\] {SETTING}"):
        _train(model, optimizer, comm.rank, range(FAULT_STEP, FAULT_STEP + 1))
    optimizer.close()


@pytest.mark.mpi(min_size=2, max_size=3)
def test_class_of_one_optimizer_is_one_error(comm):
    model = network()
    kind = torch.optim.AdamW if comm.rank else torch.optim.SGD
    optimizer = distribute(model, comm, kind(model.parameters(), lr=0.1))
    with pytest.raises(DisagreementError, match=f"optimizer {SETTING}, got SGD on rank 0 and AdamW on rank 1"):
        _train(model, optimizer, comm.rank, range(1))
    optimizer.close()


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("overlap", [True, False])
def test_parameter_frozen_before_step_is_averaged(comm, overlap):
    """A gradient that is there is stepped by torch, frozen or not; so it is exchanged."""
    model = network()
    reference = Reference(model, sgd, comm.size)
    optimizer = distribute(model, comm, overlap=overlap)
    for step in range(6):
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        reference.gradients(lambda own, rank, step=step: square(own, step, rank))
        if step == 2:
            for own in (model, reference.model):
                own[0].weight.requires_grad_(False)
        optimizer.step()
        reference.optimizer.step()
    assert_same(model, reference)
    assert_replicas(model, comm)
    optimizer.close()
