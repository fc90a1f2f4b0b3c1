"""Ways in which ranks may differ, each seeded: an error on all ranks, within two seconds, that names a rank."""

import random
import time

import numpy as np
import pytest
from marks import slow

from mpicomp.errors import MpicompError
from mpicomp.reducer.training_reducer import TrainingReducer

LIMIT_S = 2.0  # that docs/sharp-bits.md promises
pytestmark = pytest.mark.timeout(60)


def gradients(rank, step):
    rng = np.random.default_rng([step, rank])
    return {"first": rng.normal(size=(40, 30)).astype(np.float32), "second": rng.normal(size=500).astype(np.float32)}


# Settings of one rank's reducer that differ from those of the others.
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


# What one rank changes of its gradients.
ARRAYS = {
    "a parameter is missing": lambda arrays, _: arrays.pop("second"),
    "another name": lambda arrays, _: arrays.update(secnod=arrays.pop("second")),
    "one more parameter": lambda arrays, _: arrays.update(third=np.ones(3, np.float32)),
    "no parameter at all": lambda arrays, _: arrays.clear(),
    "another shape of as many elements": lambda arrays, _: arrays.update(first=np.ascontiguousarray(arrays["first"].T)),
    "a matrix as a vector": lambda arrays, _: arrays.update(first=arrays["first"].reshape(-1)),
    "another length": lambda arrays, rng: arrays.update(second=np.ones(500 + rng.randint(1, 9), np.float32)),
    "twice the bits": lambda arrays, _: arrays.update(second=arrays["second"].astype(np.float64)),
    "half the bits": lambda arrays, _: arrays.update(second=arrays["second"].astype(np.float16)),
    "integers": lambda arrays, _: arrays.update(second=arrays["second"].astype(np.int32)),
    "no array": lambda arrays, _: arrays.update(second="no array"),
}
OTHERS = ["a state of an earlier step", "a state of a later step", "one rank loads a state", "another learning rate"]
KINDS = [*SETTINGS, *ARRAYS, *OTHERS]


def raised_on_all(comm, act):
    """Run what has to raise, and return the message that all have in common, and the seconds that it took at most."""
    comm.Barrier()
    begin = time.monotonic()
    with pytest.raises(MpicompError) as found:
        act()
    seconds = comm.allgather(time.monotonic() - begin)
    raised = comm.allgather((type(found.value).__name__, str(found.value)))
    assert len(set(raised)) == 1
    return raised[0][1], max(seconds)


def disagree(comm, kind):
    """Have one rank differ from the others; return what was raised, who it was, and the seconds until then."""
    rng = random.Random(KINDS.index(kind))
    victim, step = rng.randrange(comm.size), rng.randrange(1, 6)
    odd = comm.rank == victim
    settings = {"compressor": {"id": "topk", "ratio": 0.1}, "collective": "allgather", "policy": {"warmup": 0}}
    mine = settings | (SETTINGS.get(kind, {}) if odd else {})
    reducer = TrainingReducer(**mine, comm=comm)
    try:
        if kind in SETTINGS:
            said, seconds = raised_on_all(comm, lambda: reducer.reduce(gradients(comm.rank, 0)))
            return said, victim, seconds
        states = []
        for before in range(step):
            states.append(reducer.state_dict())
            reducer.reduce(gradients(comm.rank, before))
        arrays, lr = gradients(comm.rank, step), 0.1
        if kind in ARRAYS and odd:
            ARRAYS[kind](arrays, rng)
        elif kind == "another learning rate":
            lr = "0.1" if odd else 0.1
        elif kind == "one rank loads a state" and odd:
            reducer.load_state_dict(reducer.state_dict())
        elif kind == "a state of an earlier step":
            reducer.load_state_dict(states[-1] if odd else reducer.state_dict())
        elif kind == "a state of a later step":
            reducer.load_state_dict((reducer.state_dict() | {"step": step + 3}) if odd else reducer.state_dict())
        said, seconds = raised_on_all(comm, lambda: reducer.reduce(arrays, lr=lr))
        assert reducer.last_step.step == step - 1  # nothing was applied
        return said, victim, seconds
    finally:
        reducer.close()


@pytest.mark.mpi(min_size=2, max_size=3)
@pytest.mark.parametrize("kind", [*KINDS[::14], *(slow(kind) for kind in KINDS if kind not in KINDS[::14])])
def test_rank_that_differs_is_named_in_time(comm, kind):
    said, victim, seconds = disagree(comm, kind)
    print(f"{kind}: {seconds:.3f} s: {said}")
    assert f"rank {victim}" in said
    assert seconds < LIMIT_S
