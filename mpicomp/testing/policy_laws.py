"""Laws that every policy has to obey."""

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import Request, Round, observe
from mpicomp.policies import Policy, get_policy, policy_class
from mpicomp.reducer import Reducer
from mpicomp.testing.examples import PRECISION, Array, make_reducers

_RANKS = (1, 2, 3)
_NUM_STEPS = 30
_HALFWAY = 13  # steps before a checkpoint: no multiple of the intervals of policies
_SHAPES = {"conv": (20, 30), "bias": (17,), "fc": (60, 40)}
_BUCKET_BYTES = 4096  # several buckets
_FIRST_STEPS = 10  # in which ranks may do more rounds than later
_MOST_LATE_STEPS = 2  # later steps in which they may


def check_configuration(policy: Policy) -> None:
    """Check that it is registered, that settings have defaults, and that JSON keeps its configuration."""
    cls = type(policy)
    assert policy_class(policy.id) is cls, f"'{policy.id}' is registered for another class"
    assert cls().get_config()["id"] == policy.id, "every setting needs a default"
    config = json.loads(json.dumps(policy.get_config()))
    assert get_policy(config).get_config() == config, f"{config} does not give an equal policy"
    assert not policy.serves, "the kit makes policies of their configuration; pass it one that no reducer has"


def check_ranks_have_the_same_plans(policy: Policy) -> None:
    """Check that all ranks run the same plans for the same reasons, and get the same bits."""
    for ranks in _RANKS:
        reducers, world = _begin(policy, ranks)
        for step in range(_NUM_STEPS):
            means = _reduce(world, reducers, step)
            plans = [_plans(reducer) for reducer in reducers]
            assert all(plan == plans[0] for plan in plans), f"plans differ at step {step} of {ranks} ranks: {plans}"
            assert all(_same(mean, means[0]) for mean in means), f"means differ at step {step} of {ranks} ranks"


def check_nothing_is_lost(policy: Policy) -> None:
    """Check that gradients and residuals before equal the mean times ranks and the residuals after, over all ranks."""
    for ranks in _RANKS:
        reducers, world = _begin(policy, ranks)
        if not reducers[0].feedback:
            continue
        before = {name: np.zeros(shape) for name, shape in _SHAPES.items()}
        for step in range(_NUM_STEPS):
            means = _reduce(world, reducers, step)
            for name in _SHAPES:
                entered = before[name] + sum(_gradient(step, rank)[name].astype(np.float64) for rank in range(ranks))
                after = np.sum([reducer.residual(name) for reducer in reducers], axis=0, dtype=np.float64)
                lost = np.abs(entered - ranks * means[0][name].astype(np.float64) - after).max() / np.abs(entered).max()
                assert lost < 20 * PRECISION[np.dtype(np.float32)], f"lost {lost:.3g} of the largest at step {step}"
                before[name][:] = after


def check_it_goes_on_after_a_checkpoint(policy: Policy) -> None:
    """Check that reducers that load the state of others act as these do.

    Policies that survey gradients again after it (see `Policy.resumes`) only have to agree among ranks.
    """
    for ranks in _RANKS:
        reducers, world = _begin(policy, ranks)
        for step in range(_HALFWAY):
            _reduce(world, reducers, step)
        resumed, other_world = _begin(policy, ranks)
        for reducer, other in zip(resumed, reducers, strict=True):
            state = copy.deepcopy(other.state_dict())
            try:
                state["policy"] = json.loads(json.dumps(state["policy"], allow_nan=False))
            except (TypeError, ValueError) as error:
                raise AssertionError(f"state_dict must hold JSON's types: {error}") from error
            reducer.load_state_dict(state)
        for step in range(_HALFWAY, _NUM_STEPS):
            means, again = _reduce(world, reducers, step), _reduce(other_world, resumed, step)
            plans = [_plans(reducer) for reducer in resumed]
            assert all(plan == plans[0] for plan in plans), f"resumed ranks differ at step {step}: {plans}"
            if policy.resumes:
                where = f"at step {step}, {step - _HALFWAY} after resuming"
                for first, second in zip(_plans(reducers[0]), plans[0], strict=True):
                    assert first[:2] == second[:2], f"{second} takes the place of {first} {where}"
                assert _same(means[0], again[0]), f"means differ {where}"


def check_a_step_does_not_wait(policy: Policy) -> None:
    """Check that policies add no round that ranks wait for, except in first steps and after changes."""
    reducers, world = _begin(policy, 2)
    late = 0
    for step in range(_NUM_STEPS):
        asked: list[Request] = []
        first, *others = [reducer.rounds(_gradient(step, rank), 0.1) for rank, reducer in enumerate(reducers)]
        world.run([observe(first, before=asked.append), *others])
        record = reducers[0].last_step
        assert record is not None
        waited = sum(isinstance(task, Round) and not task.background for task in asked)
        late += step >= _FIRST_STEPS and waited > sum(len(bucket.rounds) for bucket in record.buckets)
    assert late <= _MOST_LATE_STEPS, (
        f"in {late} of {_NUM_STEPS - _FIRST_STEPS} steps ranks waited for rounds of no plan"
    )


LAWS: list[Callable[[Any], None]] = [
    check_configuration,
    check_ranks_have_the_same_plans,
    check_nothing_is_lost,
    check_it_goes_on_after_a_checkpoint,
    check_a_step_does_not_wait,
]


def _begin(policy: Policy, ranks: int) -> tuple[list[Reducer], LocalWorld]:
    return make_reducers(None, "auto", ranks, policy=policy.get_config(), bucket_bytes=_BUCKET_BYTES)


def _gradient(step: int, rank: int) -> dict[str, Array]:
    rng = np.random.default_rng((step, rank))
    return {name: rng.laplace(size=shape).astype(np.float32) for name, shape in _SHAPES.items()}


def _reduce(world: LocalWorld, reducers: list[Reducer], step: int) -> list[dict[str, Array]]:
    exchanges = [reducer.rounds(_gradient(step, rank), 0.1) for rank, reducer in enumerate(reducers)]
    return [{name: mean.copy() for name, mean in means.items()} for means in world.run(exchanges)]


def _plans(reducer: Reducer) -> list[tuple[Any, ...]]:
    record = reducer.last_step
    assert record is not None
    return [(bucket.collective, bucket.compressor, bucket.reason) for bucket in record.buckets]


def _same(first: dict[str, Array], second: dict[str, Array]) -> bool:
    return all(first[name].tobytes() == second[name].tobytes() for name in first)
