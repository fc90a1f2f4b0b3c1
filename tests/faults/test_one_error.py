"""What is wrong on one rank is raised on all of them, the same, before any data moves; a NaN undoes the step."""

import random
import time
from functools import partial

import numpy as np
import pytest
from marks import slow

import mpicomp
from mpicomp.errors import (
    ConfigurationError,
    DisagreementError,
    IncompatiblePairError,
    MpicompError,
    NonFiniteError,
    UnknownNameError,
)
from mpicomp.policies import list_policies, policy_class
from mpicomp.policies.policy import MAX_REPORT_STEPS
from mpicomp.policies.schedule import with_warmup
from mpicomp.reducer.training_reducer import TrainingReducer

POLICIES = [name for name in list_policies() if policy_class(name).__module__.startswith("mpicomp.")]


def the_same_on_all(comm, kind, act):
    """Run something that has to raise, and return the message that all ranks have in common."""
    with pytest.raises(kind) as raised:
        act()
    said = comm.allgather((type(raised.value).__name__, str(raised.value)))
    assert len(set(said)) == 1
    return said[0][1]


def still_works(comm, reducer, names=("w",)):
    means = reducer.reduce({name: np.full(100, comm.rank + 1.0, np.float32) for name in names})
    assert sorted(means) == sorted(names)


WRONG = [
    ({"compressor": "nosuch"}, UnknownNameError, "compressor: unknown name 'nosuch'"),
    ({"compressor": {"id": "topk", "ratio": 2}}, ConfigurationError, "ratio is the kept fraction and must be in"),
    ({"compressor": "topk", "collective": "allreduce"}, IncompatiblePairError, "allreduce"),
    ({"collective": "nosuch"}, UnknownNameError, "unknown name 'nosuch'"),
    ({"policy": "nosuch"}, UnknownNameError, "unknown name 'nosuch'"),
    ({"policy": "gravac", "compressor": "onebit"}, ConfigurationError, "gravac"),
    ({"nonfinite": "ignore"}, UnknownNameError, "nonfinite: unknown name 'ignore'"),
    ({"feedback": 3}, ConfigurationError, "feedback must be True, False or None, got 3"),
    ({"bucket_bytes": 1.5}, ConfigurationError, "bucket_bytes must be an integer or None, got 1.5"),
    ({"bucket_bytes": 0}, ConfigurationError, "bucket_bytes must be at least 1, got 0"),
    ({"threads": "all"}, ConfigurationError, "threads must be an integer, got 'all'; convert it"),
    ({"seed": 0.5}, ConfigurationError, "seed must be an integer, got 0.5"),
]


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(
    ("wrong", "kind", "said", "first"),  # on the first rank, or on the last one
    [(*wrong, number % 2 == 0) for number, wrong in enumerate(WRONG)],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_setting_of_one_rank_is_one_error(comm, wrong, kind, said, first):
    failing = comm.rank == (0 if first else comm.size - 1)
    fine = {"compressor": "topk", "comm": comm}
    message = the_same_on_all(comm, kind, lambda: mpicomp.Reducer(**(fine | (wrong if failing else {}))))
    assert said in message
    reducer = mpicomp.Reducer("topk", comm=comm)
    still_works(comm, reducer)
    reducer.close()


STEPPED = [
    ({"id": "randomk", "ratio": 0.1}, "ring"),
    ({"id": "topk", "ratio": 0.1}, "star-topk"),
    ("globalrandk-maxnorm", "auto"),
]


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize(
    ("compressor", "collective", "running"),
    [(*stepped, number % 2 == 0) for number, stepped in enumerate(STEPPED)],
    ids=str,
)
def test_state_of_another_step_is_one_error(comm, compressor, collective, running):
    def make():
        return mpicomp.Reducer(compressor, collective, comm=comm)

    def gradients(step):
        return {"w": np.random.default_rng([comm.rank, step]).normal(size=3000).astype(np.float32)}

    earlier = make()
    states = [earlier.state_dict()]
    for step in range(2):
        earlier.reduce(gradients(step))
        states.append(earlier.state_dict())
    reducer = earlier if running else make()
    last = comm.size - 1
    reducer.load_state_dict(states[1 if comm.rank == last else 2])
    message = the_same_on_all(comm, DisagreementError, lambda: reducer.reduce(gradients(2)))
    assert f"the step that follows must be the same on all ranks, got 2 on rank 0 and 1 on rank {last}" in message
    the_same_on_all(comm, DisagreementError, lambda: reducer.reduce(gradients(2)))
    assert reducer.state_dict()["step"] == (1 if comm.rank == last else 2)
    if comm.rank == last:
        reducer.load_state_dict(states[2])
    again = reducer.reduce(gradients(2))["w"].tobytes()
    assert len(set(comm.allgather(again))) == 1
    assert reducer.last_step.step == 2
    assert reducer.state_dict()["step"] == 3
    if not running:
        earlier.close()
    reducer.close()


@pytest.mark.mpi(max_size=3)
def test_all_ranks_go_back_to_an_earlier_step(comm):
    reducer = mpicomp.Reducer({"id": "randomk", "ratio": 0.1}, "ring", comm=comm)

    def step(number):
        gradient = np.random.default_rng([comm.rank, number]).normal(size=3000).astype(np.float32)
        return reducer.reduce({"w": gradient})["w"].tobytes(), reducer.residual("w").tobytes()

    step(0)
    state = reducer.state_dict()
    before = [step(number) for number in (1, 2)]
    reducer.load_state_dict(state)
    assert reducer.state_dict()["step"] == 1
    assert [step(number) for number in (1, 2)] == before
    reducer.close()


@pytest.mark.mpi(max_size=3)
def test_state_without_a_step_loads_nothing(comm):
    reducer = mpicomp.Reducer({"id": "topk", "ratio": 0.1}, comm=comm)
    still_works(comm, reducer)
    before, state = reducer.residual("w"), reducer.state_dict()
    state["residuals"]["w"][:] = 7
    for wrong in ({key: value for key, value in state.items() if key != "step"}, state | {"step": -1}):
        with pytest.raises(ConfigurationError, match="reducer: the state's step must be"):
            reducer.load_state_dict(wrong)
        assert reducer.residual("w").tobytes() == before.tobytes()
    reducer.close()


@pytest.mark.mpi(max_size=3)
def test_state_of_another_policy_is_one_error(comm):
    reducer = mpicomp.Reducer({"id": "topk"}, policy="gravac", comm=comm)
    still_works(comm, reducer)
    state = reducer.state_dict()
    if comm.rank == comm.size - 1:
        state["policy"] |= {"floor": "highest"}
    reducer.load_state_dict(state)
    message = the_same_on_all(comm, ConfigurationError, lambda: still_works(comm, reducer))
    assert "reducer: the loaded state was not saved by policy 'gravac'" in message
    reducer.close()


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("policy", ["static", "accordion", "auto"])
def test_learning_rate_of_any_type_is_a_float(comm, policy):
    torch = pytest.importorskip("torch")
    rates = [0.25, np.float32(0.25), np.float64(0.25), np.array(0.25), torch.tensor(0.25), 1, True]
    compressor = {"id": "topk", "ratio": 0.1} if policy != "auto" else None
    reducer = mpicomp.Reducer(compressor, policy=policy, comm=comm)
    for lr in [*rates, *rates, *[1] * MAX_REPORT_STEPS]:  # until all of them are reported
        reducer.reduce({"w": np.full(3000, comm.rank + 1.0, np.float32)}, lr=lr)
        assert type(reducer.last_step.lr) is float
        assert reducer.last_step.lr == float(lr)
    if policy == "accordion":
        assert reducer.state_dict()["policy"]["highest_lr"] == 1.0
    reducer.close()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("lr", ["0.1", [1.0, 2.0], np.ones(2), 1j], ids=str)
def test_learning_rate_that_is_no_number_is_one_error(comm, lr):
    reducer = mpicomp.Reducer({"id": "topk"}, "allgather", comm=comm)
    still_works(comm, reducer)
    act = partial(reducer.reduce, {"w": np.ones(100, np.float32)}, lr=lr if comm.rank == comm.size - 1 else 0.1)
    assert "reduce: lr must be a number or None, got" in the_same_on_all(comm, ConfigurationError, act)
    still_works(comm, reducer)
    reducer.close()


def gradients(rank, step, bad=None):
    rng = np.random.default_rng([rank, step])
    arrays = {name: rng.normal(size=size).astype(np.float32) for name, size in (("a", 4000), ("b", 300))}
    if bad is not None:
        arrays["b"][7] = bad
    return arrays


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(
    ("policy", "mode"), [(policy, ("raise", "skip")[number % 2]) for number, policy in enumerate(POLICIES)]
)
def test_nonfinite_gradient_is_one_end_on_all_ranks(comm, policy, mode, monkeypatch):
    monkeypatch.setenv("MPICOMP_PROBE", "0")
    compressor = None if policy == "auto" else "topk"
    reducer = mpicomp.Reducer(compressor, policy=with_warmup(policy, 0), nonfinite=mode, comm=comm)
    for step in range(8):
        bad = {3: np.nan, 6: np.inf}.get(step)
        arrays = gradients(comm.rank, step, bad if comm.rank == comm.size - 1 else None)
        before = {name: reducer.residual(name) for name in arrays} if step else {}
        if bad is not None and mode == "raise":
            with pytest.raises(NonFiniteError, match=f"got NaN or infinity on some rank at step {step}"):
                reducer.reduce(arrays)
            means = {}
        else:
            means = {name: mean.copy() for name, mean in reducer.reduce(arrays).items()}
        assert len(set(comm.allgather(tuple(mean.tobytes() for mean in means.values())))) == 1
        if bad is not None:
            assert all(reducer.residual(name).tobytes() == before[name].tobytes() for name in arrays)
            assert not any(mean.any() for mean in means.values())
        else:
            assert all(np.isfinite(mean).all() for mean in means.values())
            assert any(mean.any() for mean in means.values())
    reducer.close()


@pytest.mark.mpi(min_size=2, max_size=2)
def test_state_that_one_rank_alone_has_loaded_is_one_error_with_its_remedy(comm):
    earlier = mpicomp.Reducer("topk", comm=comm)
    still_works(comm, earlier)
    reducer = mpicomp.Reducer("topk", comm=comm)
    if comm.rank == 1:
        reducer.load_state_dict(earlier.state_dict())
    message = the_same_on_all(comm, DisagreementError, lambda: still_works(comm, reducer))
    assert 'del state["mpicomp"]' in message
    if comm.rank == 1:
        reducer.drop_loaded_state()
    still_works(comm, reducer)
    for made in (earlier, reducer):
        made.close()


# What one rank's reducer has that those of the others have not, and what it changes of its gradients.
SETTINGS = {
    "another compressor": {"compressor": {"id": "gaussiank", "ratio": 0.1}},
    "another ratio": {"compressor": {"id": "topk", "ratio": 0.2}},
    "another setting of the compressor": {"compressor": {"id": "topk", "ratio": 0.1, "wire": "bf16"}},
    "no compressor": {"compressor": None},
    "another collective": {"collective": "star-topk:ring"},
    "the collective left to the policy": {"collective": "auto"},
    "another policy": {"policy": "accordion"},
    "no error feedback": {"feedback": False},
    "another way with NaN": {"nonfinite": "skip"},
    "other buckets": {"bucket_bytes": 1000},
    "another seed": {"seed": 1},
    "another warm-up": {"policy": {"warmup": 7}},
    "residuals that decay": {"feedback_decay": 0.9},
    "another kind of optimizer": {"normalises": False},
}
ARRAYS = {
    "a parameter is missing": lambda arrays: arrays.pop("b"),
    "another name": lambda arrays: arrays.update(c=arrays.pop("b")),
    "one more parameter": lambda arrays: arrays.update(third=np.ones(3, np.float32)),
    "no parameter at all": lambda arrays: arrays.clear(),
    "a vector as a matrix": lambda arrays: arrays.update(a=arrays["a"].reshape(40, 100)),
    "another length": lambda arrays: arrays.update(b=np.ones(305, np.float32)),
    "twice the bits": lambda arrays: arrays.update(b=arrays["b"].astype(np.float64)),
    "half the bits": lambda arrays: arrays.update(b=arrays["b"].astype(np.float16)),
    "integers": lambda arrays: arrays.update(b=arrays["b"].astype(np.int32)),
    "no array": lambda arrays: arrays.update(b="no array"),
}
OTHERS = ["a state of an earlier step", "a state of a later step", "one rank loads a state", "another learning rate"]
KINDS = [*SETTINGS, *ARRAYS, *OTHERS]
LIMIT_S = 2.0  # that docs/sharp-bits.md promises


@pytest.mark.timeout(60)
@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("kind", [*KINDS[::14], *(slow(kind) for kind in KINDS if kind not in KINDS[::14])])
def test_rank_that_differs_is_named_in_time(comm, kind):
    rng = random.Random(KINDS.index(kind))
    victim, step = rng.randrange(comm.size), rng.randrange(1, 6) * (kind not in SETTINGS)
    odd = comm.rank == victim
    settings = {"compressor": {"id": "topk", "ratio": 0.1}, "collective": "allgather", "policy": {"warmup": 0}}
    reducer = TrainingReducer(**settings | (SETTINGS.get(kind, {}) if odd else {}), comm=comm)
    for before in range(step):
        earlier = reducer.state_dict()
        reducer.reduce(gradients(comm.rank, before))
    arrays, lr = gradients(comm.rank, step), 0.1
    if kind in ARRAYS and odd:
        ARRAYS[kind](arrays)
    elif kind == "another learning rate":
        lr = "0.1" if odd else 0.1
    elif kind in OTHERS and (odd or kind != "one rank loads a state"):
        state = reducer.state_dict()
        later = state | {"step": step + 3} if kind == "a state of a later step" else state
        wrong = earlier if kind == "a state of an earlier step" else later
        reducer.load_state_dict(wrong if odd else state)
    comm.Barrier()
    begin = time.monotonic()
    message = the_same_on_all(comm, MpicompError, lambda: reducer.reduce(arrays, lr=lr))
    assert f"rank {victim}" in message
    assert time.monotonic() - begin < LIMIT_S
    if step:
        assert reducer.last_step.step == step - 1  # nothing was applied
    reducer.close()
