"""What a first try gets wrong ends in an error that says what to write, when the optimizer is made."""

import pytest

import mpicomp
from mpicomp.errors import ConfigurationError, DisagreementError

torch = pytest.importorskip("torch")

from replicas import close_at_end, descent, gloo, network, sgd, train  # noqa: E402

from mpicomp.systems.optimizers.power_gossip import PowerGossip  # noqa: E402
from mpicomp.systems.optimizers.sketched_amsgrad import SketchedAMSGrad  # noqa: E402

wrap, update = mpicomp.torch.DistributedOptimizer, mpicomp.torch.UpdateOptimizer
onebit, sketched, gossip = mpicomp.torch.OneBitAdam, SketchedAMSGrad, PowerGossip

MISTAKES = {
    "parameters": (lambda m, **c: wrap(sgd(m), m.parameters(), **c), r"pass named_parameters=model.named_parameters\("),
    "updates": (lambda m, **c: update(sgd(m), m.parameters(), **c), r"pass named_parameters=model.named_parameters\("),
    "ratio": (lambda m, **c: wrap(sgd(m), m, "topk", ratio=0.05, **c), r"mpicomp.TopK\(ratio=0.05\).*'id': 'topk'"),
    "updates_ratio": (lambda m, **c: update(sgd(m), m, 1, "topk", ratio=0.05, **c), r"mpicomp.TopK\(ratio=0.05\)"),
    "reducer_ratio": (lambda m, **c: mpicomp.Reducer("topk", ratio=0.05, **c), r"mpicomp.TopK\(ratio=0.05\)"),
    "spelling": (lambda m, **c: wrap(sgd(m), m, "topk", sede=1, **c), "unknown name 'sede'; did you mean 'seed'"),
    "gossip": (lambda m, **c: gossip(sgd(m), m.named_parameters(), **c), "second argument is the graph.*leave named_"),
    "gossip_model": (lambda m, **c: gossip(sgd(m), m, **c), "second argument is the graph"),
    "lbfgs": (lambda m, **c: wrap(torch.optim.LBFGS(m.parameters()), m, **c), "use mpicomp.torch.UpdateOptimizer"),
    "onebit_join": (
        lambda m, **c: onebit(m, **c).join(),
        "OneBitAdam: join.* DistributedOptimizer and UpdateOptimizer",
    ),
    "sketched_join": (lambda m, **c: sketched(m, **c).join(), "SketchedAMSGrad: join"),
    "gossip_join": (lambda m, **c: gossip(sgd(m), **c).join(), "PowerGossip: join"),
}


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize(("make", "message"), MISTAKES.values(), ids=MISTAKES)
def test_first_mistake_names_what_to_write(comm, make, message):
    with pytest.raises(ConfigurationError, match=message):
        make(network(), comm=comm)


TRAINED = {
    "distributed": lambda p, c: wrap(torch.optim.SGD([p], lr=0.1), {"w": p}, comm=c),
    "updates": lambda p, c: update(torch.optim.SGD([p], lr=0.1), {"w": p}, comm=c),
    "onebit": lambda p, c: onebit([("w", p)], comm=c),
    "gossip": lambda p, c: gossip(torch.optim.SGD([p], lr=0.1), comm=c),
}
KINDS = {
    "float8": (lambda: torch.ones(3, dtype=torch.float8_e4m3fn), r"is of float8_e4m3fn; .*complex128"),
    "meta": (lambda: torch.ones(3, device="meta"), "on the device 'meta'"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "has the layout torch.sparse_coo"),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "has no shape yet"),
    "conjugated": (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugates or negates lazily"),
}


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("make", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize(("parameter", "message"), KINDS.values(), ids=KINDS)
def test_unserved_parameter_is_refused_when_made(comm, make, parameter, message):
    bad = comm.rank == comm.size - 1  # all ranks raise what one of them finds
    tensor = parameter() if bad else torch.ones(3)
    tensor = tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor)
    with pytest.raises(ConfigurationError, match=message):
        make(tensor, comm)


@pytest.mark.mpi(max_size=2)
def test_sharded_parameters_are_refused_when_made(comm):
    from torch.distributed import fsdp

    with gloo(comm):
        model = torch.nn.Linear(4, 4)
        fsdp.fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (comm.size,)))
        with pytest.raises(ConfigurationError, match=r"is a DTensor.*docs/pytorch\.md"):
            wrap(descent(model), model, comm=comm)
        with pytest.raises(ConfigurationError, match="is a DTensor"):
            mpicomp.torch.broadcast_parameters(model, comm=comm)


@pytest.mark.mpi(max_size=2)
def test_sparse_gradients_in_ddp_are_refused_when_made(comm):
    with gloo(comm):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.EmbeddingBag(9, 4, sparse=True))
        with pytest.raises(ConfigurationError, match="sparse=False, or use DistributedOptimizer"):
            mpicomp.torch.DDPState(model, "topk", comm=comm)


@pytest.mark.mpi
@pytest.mark.parametrize("make", [wrap, update])
def test_model_itself_stands_for_its_names(comm, make):
    model = network()
    train(model, close_at_end(make(sgd(model), model, comm=comm)), [0], comm.rank)


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows = torch.nn.Embedding(12, 4, max_norm=0.5)

    def forward(self, places):
        return self.rows(places).square().sum()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make", [wrap, update])
def test_forward_that_writes_to_a_weight_is_named(comm, make):
    """Rows that a batch looks up are scaled, so that ranks with different batches hold different weights."""
    model = Words()
    with pytest.raises(ConfigurationError, match=r"'rows' has max_norm=0.5: forward .* writes to its weight.*renorm_"):
        make(sgd(model), model, comm=comm)
    optimizer = close_at_end(make(sgd(model), model.named_parameters(), comm=comm))
    with pytest.raises(DisagreementError, match=r"parameter 'rows.weight' has other values.*max_norm= writes to"):
        train(model, optimizer, range(2), comm.rank, lambda m, _, rank: m(torch.arange(3) + 3 * rank % 12))
