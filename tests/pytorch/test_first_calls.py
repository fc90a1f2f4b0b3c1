"""Arguments of a wrong kind, names of other libraries, and NumPy's numbers, in every public constructor."""

import numpy as np
import pytest
import torch
from replicas import close_at_end, network, sgd

import mpicomp
from mpicomp.errors import ConfigurationError
from mpicomp.torch import DistributedOptimizer, LocalMuon, Muon, UpdateOptimizer
from mpicomp.torch import broadcast_optimizer_state as broadcast_state
from mpicomp.torch import broadcast_parameters as broadcast


def distribute(model, comm, **settings):
    return close_at_end(DistributedOptimizer(sgd(model), model, comm=comm, **settings))


def update(model, comm, **settings):
    return close_at_end(UpdateOptimizer(sgd(model), model, comm=comm, **settings))


def muon(model, comm, **settings):
    return close_at_end(LocalMuon(model, comm=comm, **settings))


def reducer(model, comm, **settings):
    return close_at_end(mpicomp.Reducer(comm=comm, **settings))


def mean(model, comm, **settings):
    return mpicomp.allreduce(np.ones(5, np.float32), comm=comm, **settings)


def send(model, comm, **settings):
    return broadcast(model, comm=comm, **settings)


def send_state(model, comm, **settings):
    return broadcast_state(sgd(model), comm=comm, **settings)


WRONG = [
    (distribute, {"compressor": mpicomp.TopK}, r"compressor must be .*got the class TopK; pass an object, TopK\(\)"),
    (distribute, {"overlap": "yes"}, "DistributedOptimizer: overlap must be True, False or None, got 'yes'"),
    (distribute, {"compare_every": "10"}, "compare_every must be an integer, got '10'; convert it to a number"),
    (distribute, {"same_batches": "no"}, "same_batches must be True or False, got 'no'"),
    (distribute, {"scaler": True}, "scaler must be a GradScaler or None, got True"),
    (distribute, {"collective": 3}, "collective must be a string such as 'auto', got 3"),
    (distribute, {"process_group": None}, "unknown name 'process_group'; pass comm="),
    (distribute, {"backward_passes_per_step": 2}, r"with optimizer.accumulate\(\)"),
    (distribute, {"op": "sum"}, "unknown name 'op'; gradients are averaged.*Known: .*gradient_as_bucket_view.*scaler"),
    (distribute, {"gradient_as_bucket_views": True}, "did you mean 'gradient_as_bucket_view'"),
    (update, {"every": 3}, "UpdateOptimizer: .*unknown name 'every'.* sync_every="),
    (update, {"sync_every": 2.5}, "sync_every must be an integer or a string, got 2.5"),
    (muon, {"lr": "0.02"}, "LocalMuon: lr must be a number, got '0.02'; convert it"),
    (muon, {"matrices": "0.weight"}, "matrices must be a list or None, got '0.weight'"),
    (muon, {"betas": (0.9, 0.95)}, "LocalMuon: settings: unknown name 'betas'.*Known: .*adamw_lr.*sync_every.*threads"),
    (reducer, {"on_failure": 3}, "on_failure must be a string such as 'abort' or a function, got 3"),
    (mean, {"error": "1e-3"}, "allreduce: error must be a number or None, got '1e-3'"),
    (send, {"root": "0"}, "broadcast_parameters: root must be an integer, got '0'"),
    (send, {"root_rank": 0}, "the rank whose values are sent is root="),
    (send_state, {"src": 0}, "the rank whose values are sent is root="),
]


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize(
    ("call", "wrong", "message"), WRONG, ids=[f"{call.__name__}-{next(reversed(wrong))}" for call, wrong, _ in WRONG]
)
def test_wrong_kind_or_name_on_one_rank_is_refused_by_name_on_all(comm, call, wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        call(network(), comm, **(wrong if comm.rank == comm.size - 1 else {}))
    call(network(), comm)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: DistributedOptimizer(sgd(m)), "named_parameters is missing; pass it, such as model.named_param"),
        (lambda m: DistributedOptimizer(sgd(m), m, "topk", "auto", None, True), "policy is the last .* got 6 of them"),
        (lambda m: DistributedOptimizer(sgd(m), m, named_parameters=m), "named_parameters was passed twice"),
        (lambda m: Muon([m[0].weight], lr="0.02"), "Muon: lr must be a number, got '0.02'; convert it to a number"),
        (lambda m: Muon([m[0].weight], momentum=1.0), "Muon: momentum must be at least 0 and below 1, got 1.0"),
        (lambda m: mpicomp.torch.ddp_comm_hook(None, None), r"must be a DDPState, got NoneType; .*register_comm_hook"),
        (lambda m: mpicomp.TopK(ratios=0.1), "TopK: settings: unknown name 'ratios'; did you mean 'ratio'"),
        (lambda m: mpicomp.Dense("fp16", 3), "Dense: takes wire, got 2 values"),
        (lambda m: mpicomp.get_compressor(mpicomp.TopK), r"got the class TopK; pass an object, TopK\(\)"),
    ],
)
def test_first_call_gets_no_words_of_python(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call(network())


NUMPY = [
    (distribute, {"compare_every": np.int64(5), "overlap": np.True_, "bucket_bytes": np.int32(4096)}),
    (update, {"sync_every": np.int64(2), "feedback_decay": np.float32(0.5), "compressor": "topk"}),
    (muon, {"lr": np.float32(0.02), "adamw_lr": np.longdouble(0.001), "sync_every": np.int16(1)}),
    (mean, {"error": np.float32(1e-3), "relative": np.True_}),
    (send, {"root": np.int64(0)}),
]


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize(("call", "settings"), NUMPY, ids=[f"{c.__name__}-{next(iter(s))}" for c, s in NUMPY])
def test_numbers_of_numpy_are_settings(comm, call, settings):
    """Warnings are errors here, as an overflow in a comparison of float32 would be one."""
    model = network()
    made = call(model, comm, **settings)
    if isinstance(made, mpicomp.Reducer):
        made.reduce({"w": np.ones(4)})
    elif isinstance(made, torch.optim.Optimizer):
        model(torch.ones(1, 6)).sum().backward()
        made.step()


def test_settings_of_compressors_and_policies_hold_pythons_numbers():
    assert type(mpicomp.TopK(np.float32(0.25)).ratio) is float
    assert type(mpicomp.get_compressor({"id": "mstopk", "samplings": np.int64(4)}).samplings) is int
    policy = mpicomp.get_policy({"id": "schedule", "begin": np.float32(0.5), "steps": np.int32(5)})
    assert (type(policy.begin), type(policy.steps)) == (float, int)
