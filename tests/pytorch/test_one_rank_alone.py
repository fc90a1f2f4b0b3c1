"""What one rank alone does to its optimizer or model is one error on all ranks, with and without overlap."""

import numpy as np
import pytest
from marks import slow

import mpicomp
from mpicomp.errors import ConfigurationError, DisagreementError

torch = pytest.importorskip("torch")

from replicas import assert_replicas, descent, distribute, network, square, train  # noqa: E402

from mpicomp.systems.optimizers.power_gossip import PowerGossip  # noqa: E402
from mpicomp.systems.optimizers.sketched_amsgrad import SketchedAMSGrad  # noqa: E402

each_overlap = pytest.mark.parametrize("overlap", [True, slow(False)])


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.words = torch.nn.Embedding(30, 3, sparse=True)
        self.head = torch.nn.Linear(3, 9)
        self.more = torch.nn.Embedding(20, 9, sparse=True)


def words_loss(model, step, rank):
    tokens = torch.from_numpy(np.random.default_rng((step, rank)).integers(0, 20, (4, 5)))
    return (model.head(model.words(tokens)) * model.more(tokens)).square().sum()


def of_two_layers(model, **settings):
    return torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1, **settings)


@pytest.mark.mpi(min_size=2, max_size=3)
@each_overlap
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("compressor", ["dense", "topk"])
def test_group_added_on_one_rank_is_refused(comm, compressor, steps, overlap):
    model = network()
    plain = of_two_layers(model, momentum=0.9)
    collective = "allreduce" if compressor == "dense" else "allgather"
    optimizer = distribute(model, comm, plain, compressor, collective, overlap=overlap)
    train(model, optimizer, range(steps), comm.rank)
    if comm.rank == comm.size - 1:
        optimizer.add_param_group({"params": list(model[4].parameters())})
    message = rf"all ranks must pass the same names; '4.bias' is on rank {comm.size - 1} but not on rank 0"
    with pytest.raises(DisagreementError, match=message):
        train(model, optimizer, [7], comm.rank)
    # Mended, all go on.
    if comm.rank < comm.size - 1:
        optimizer.add_param_group({"params": list(model[4].parameters())})
    train(model, optimizer, range(8, 10), comm.rank)
    assert optimizer.reducer.last_step.step == steps + 1
    assert_replicas(model, comm)


@pytest.mark.mpi(min_size=2, max_size=3)
@each_overlap
def test_group_of_other_values_is_refused(comm, overlap):
    model = network()
    plain = of_two_layers(model)
    optimizer = distribute(model, comm, plain, overlap=overlap)
    train(model, optimizer, range(2), comm.rank)
    if comm.rank == 1:
        with torch.no_grad():
            model[4].bias[0] += 1
    optimizer.add_param_group({"params": list(model[4].parameters())})
    with pytest.raises(DisagreementError, match=r"parameter '4.bias' has other values on rank 1 than on rank 0"):
        train(model, optimizer, [2], comm.rank)


@pytest.mark.mpi(min_size=2, max_size=3)
@each_overlap
@pytest.mark.parametrize("part", ["words", "head"])
def test_part_frozen_on_one_rank_is_refused(comm, part, overlap):
    model = Words()
    optimizer = distribute(model, comm, descent(model, 0.01), overlap=overlap)
    train(model, optimizer, range(2), comm.rank, words_loss)
    if comm.rank == 0:
        getattr(model, part).requires_grad_(False)
    with pytest.raises(DisagreementError, match=rf"'{part}\.\w+' is on rank 1 but not on rank 0"):
        train(model, optimizer, [2], comm.rank, words_loss)
    getattr(model, part).requires_grad_(False)
    train(model, optimizer, range(3, 5), comm.rank, words_loss)
    getattr(model, part).requires_grad_(True)
    train(model, optimizer, range(5, 7), comm.rank, words_loss)
    assert_replicas(model, comm)


@pytest.mark.mpi(max_size=3)
@each_overlap
@pytest.mark.parametrize("whose", ["all", "one"])
def test_parameter_put_into_a_group_by_hand_is_refused(comm, whose, overlap):
    """It would be trained on each rank by itself."""
    model = network()
    plain = of_two_layers(model)
    optimizer = distribute(model, comm, plain, overlap=overlap)
    train(model, optimizer, range(2), comm.rank)
    if whose == "all" or comm.rank == 0:
        optimizer.param_groups[0]["params"].append(model[4].bias)
    with pytest.raises(ConfigurationError, match=r"holds a parameter of shape \(2,\) that is not exchanged"):
        train(model, optimizer, [2], comm.rank)


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("steps", [0, 2])
def test_gradient_changed_on_one_rank_is_refused(comm, steps):
    model = network()
    optimizer = distribute(model, comm)
    train(model, optimizer, range(steps), comm.rank)
    optimizer.zero_grad()
    square(model, 9, comm.rank).backward()
    if comm.rank == 1:
        model[2].weight.grad.mul_(2)
    with pytest.raises(ConfigurationError, match=r"was changed between backward\(\) and step\(\).*\(on rank 1\)"):
        optimizer.step()
    train(model, optimizer, range(3), comm.rank)
    assert_replicas(model, comm)


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize(
    "wrong",
    [
        lambda model: (torch.optim.LBFGS(model.parameters()), {}),
        lambda model: (model, {}),
        lambda model: (descent(model), {"compressor": "nosuch"}),
        lambda model: (descent(model), {"collective": "nosuch"}),
        lambda model: (torch.optim.SGD(torch.nn.Linear(2, 3).parameters(), lr=0.1), {}),
    ],
    ids=["lbfgs", "model", "compressor", "collective", "parameters"],
)
def test_refusal_on_one_rank_is_one_on_all(comm, wrong):
    model = network()
    plain, settings = descent(model), {}
    if comm.rank == comm.size - 1:
        plain, settings = wrong(model)
    with pytest.raises(ConfigurationError):
        mpicomp.torch.DistributedOptimizer(plain, model.named_parameters(), comm=comm, **settings)
    assert type(plain).__name__ in ("SGD", "LBFGS", "Sequential")
    # The optimizer is as it was, on all ranks.
    if not settings and isinstance(plain, torch.optim.SGD):
        square(model, 0, comm.rank).backward()
        plain.step()


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize(
    "make",
    [
        lambda model, comm, bad: mpicomp.torch.OneBitAdam(model.parameters(), warmup_steps=0 if bad else 1, comm=comm),
        lambda model, comm, bad: SketchedAMSGrad(model.parameters(), eps=0 if bad else 1e-8, comm=comm),
        lambda model, comm, bad: PowerGossip(descent(model), rank=0 if bad else 1, comm=comm),
        lambda model, comm, bad: mpicomp.torch.broadcast_parameters({"w": "text" if bad else torch.ones(2)}, comm=comm),
        lambda model, comm, bad: mpicomp.torch.broadcast_parameters(model, root=7 if bad else 0, comm=comm),
    ],
    ids=["onebit", "sketched", "gossip", "broadcast", "root"],
)
def test_refusal_of_other_calls_is_one_on_all(comm, make):
    model = network()
    with pytest.raises((ConfigurationError, mpicomp.errors.ArrayTypeError, DisagreementError)):
        make(model, comm, comm.rank == comm.size - 1)


@pytest.mark.mpi(max_size=3)
@each_overlap
@pytest.mark.parametrize(
    "lr",
    [1, 0.125, np.float32(0.125), np.float64(0.125), np.int64(1), torch.tensor(0.125), torch.tensor([0.125]),
     torch.tensor(0.125, dtype=torch.float64), torch.tensor(0.125, requires_grad=True), torch.tensor(1)],
    ids=["int", "float", "float32", "float64", "int64", "tensor", "tensor-1", "double", "requires_grad", "integer"],
)  # fmt: skip
def test_learning_rates_of_every_kind_are_recorded(comm, monkeypatch, lr, overlap):
    """The policy receives them with the telemetry of a step."""
    model = network()
    settings = {"policy": "accordion", "overlap": overlap}
    optimizer = distribute(model, comm, descent(model, 0.125), mpicomp.TopK(ratio=0.2), "allgather", **settings)
    optimizer.param_groups[0]["lr"] = lr
    reported = []
    policy = optimizer.reducer.policy
    inner = policy.on_telemetry
    monkeypatch.setattr(policy, "on_telemetry", lambda report: reported.append(report.lr) or inner(report))
    for step in range(8):
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        with torch.no_grad():
            optimizer.step()
        assert type(optimizer.reducer.last_step.lr) is float
        assert optimizer.reducer.last_step.lr == float(np.asarray(torch.as_tensor(lr).detach()).reshape(-1)[0])
    assert reported == [optimizer.reducer.last_step.lr] * 7


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD], ids=lambda m: m.__name__)
def test_learning_rate_in_a_tensor_follows_its_schedule(comm, make, capturable):
    """As capturable ones and compiled ones have it, with a scheduler that writes into it."""
    if capturable and make is torch.optim.SGD:
        return
    model = network()
    settings = {"capturable": True} if capturable else {}
    optimizer = distribute(model, comm, make(model.parameters(), lr=torch.tensor(0.5), foreach=False, **settings))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    held = optimizer.param_groups[0]["lr"]
    for group in optimizer.param_groups:
        group["capturable"] = False  # the step itself wants a device
    for step in range(8):
        optimizer.zero_grad()
        square(model, step, comm.rank).backward()
        optimizer.step()
        assert optimizer.reducer.last_step.lr == 0.5 * 0.5**step
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is held
    assert_replicas(model, comm)
