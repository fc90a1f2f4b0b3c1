"""Whatever was put into an optimizer before it is wrapped, or is put there later: each step exchanges, once."""

import copy
import gc
import io
import pickle
import types
import unittest.mock
import weakref

import pytest
import torch
from marks import slow
from replicas import assert_equal, close_at_end, distribute, network, sgd, square
from torch.optim.optimizer import register_optimizer_step_pre_hook

import mpicomp
from mpicomp.errors import ClosedError, ConfigurationError
from mpicomp.mpi import LocalWorld

# What torch.compile does within.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:The .grad attribute of a T")


def alone(model, optimizer, *args, **settings):
    end = LocalWorld(1).transports[0]
    return close_at_end(mpicomp.torch.DistributedOptimizer(optimizer, model, *args, comm=end, **settings))


def gradients(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def wrapper(optimizer, seen):
    inner = optimizer.step

    def step(closure=None):
        seen.append("wrapper")
        return inner(closure)

    optimizer.step = step


def method(optimizer, seen):
    inner = optimizer.step

    def step(self, *args, **kwargs):
        assert self is optimizer
        seen.append("method")
        return inner(*args, **kwargs)

    optimizer.step = types.MethodType(step, optimizer)


def compiled(optimizer, seen):
    optimizer.step = torch.compile(optimizer.step, backend="eager")


WAYS = [wrapper, method, slow(compiled)]  # test_states.py has a compiled model among quick tests
CALLS = {wrapper: ["wrapper"], method: ["method"]}


@pytest.mark.parametrize("closure", [False, True], ids=["plain", "closure"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", WAYS)
def test_step_with_something_around_it_exchanges_once(way, when, closure):
    if (way, when) == (compiled, "after"):
        torch._dynamo.reset()
    plain, model, seen = network(), network(), []
    reference, base = sgd(plain), sgd(model)
    if when == "before":
        way(base, seen)
    optimizer = alone(model, base, "dense", "allreduce")
    if when == "after":
        way(optimizer, seen)
    for step in range(3):

        def backward(model=model, step=step):
            optimizer.zero_grad()
            loss = square(model, step, 0)
            loss.backward()
            return loss

        reference.zero_grad()
        expected = square(plain, step, 0)
        expected.backward()
        reference.step()
        if closure:
            assert optimizer.step(backward).item() == expected.item()
        else:
            backward()
            optimizer.step()
        assert optimizer.reducer.last_step.step == step
        assert optimizer.reducer.state_dict()["step"] == step + 1
    assert seen == CALLS.get(way, []) * 3
    assert_equal(plain, model)


def test_steps_that_were_looked_up_before_exchange():
    """A profiler that puts back what it has found, a bound method, the step of the class."""
    model = network()
    base = sgd(model)
    bound = base.step
    with unittest.mock.patch.object(base, "step", wraps=base.step):
        optimizer = alone(model, base, "dense")
    count = 0
    for step in (optimizer.step, bound, lambda: torch.optim.SGD.step(optimizer), base.step):
        square(model, 0, 0).backward()
        step()
        assert optimizer.reducer.last_step.step == count
        count += 1
        optimizer.zero_grad()
    loss = bound(lambda: square(model, 0, 0))
    assert loss.item() == square(model, 0, 0).item()
    assert optimizer.reducer.last_step.step == count


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize("loaded", [False, True], ids=["new", "loaded"])
def test_hooks_run_once_and_see_means(comm, loaded):
    model, seen = network(), []

    def pre(which):
        return lambda *_: seen.append((which, gradients(model).clone()))

    base = sgd(model)
    if loaded:
        torch.optim.lr_scheduler.StepLR(base, 10)
    base.register_step_pre_hook(pre("early"))
    everywhere = register_optimizer_step_pre_hook(pre("global"))
    try:
        optimizer = distribute(model, comm, base)
        if loaded:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.register_step_pre_hook(pre("late"))
        optimizer.register_step_post_hook(lambda *_: seen.append(("post", gradients(model).clone())))
        for step in range(2):
            optimizer.zero_grad()
            square(model, step, comm.rank).backward()
            optimizer.step()
            assert [which for which, _ in seen] == ["global", "early", "late", "post"]
            rows = comm.allgather(gradients(model).numpy())
            assert all((row == rows[0]).all() for row in rows)
            assert all(torch.equal(found, gradients(model)) for _, found in seen)
            seen.clear()
    finally:
        everywhere.remove()


def test_step_after_one_that_failed_exchanges():
    model = network()
    base = sgd(model)
    optimizer = alone(model, base, "dense")
    fails = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    square(model, 0, 0).backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    fails.remove()
    optimizer.step()
    assert optimizer.reducer.last_step.step == 1


def test_closure_that_is_called_again_is_refused():
    model = network()
    base = sgd(model)
    inner = base.step
    base.step = lambda closure: (inner(closure), inner(closure))
    optimizer = alone(model, base, "dense")
    with pytest.raises(ConfigurationError, match="calls its closure several times in a step"):
        optimizer.step(lambda: square(model, 0, 0))


@pytest.mark.parametrize(
    "make",
    [
        lambda model: alone(model, sgd(model), "topk"),
        lambda model: mpicomp.torch.UpdateOptimizer(sgd(model), model, comm=LocalWorld(1).transports[0]),
    ],
    ids=["distributed", "updates"],
)
def test_copies_and_pickles_are_refused_and_states_are_not(make):
    model = network()
    optimizer = make(model)
    square(model, 0, 0).backward()
    optimizer.step()
    for act in (copy.copy, copy.deepcopy, pickle.dumps, lambda o: torch.save({"o": o}, io.BytesIO())):
        with pytest.raises(ConfigurationError, match=r"can be neither copied nor pickled; .* its state_dict\(\)"):
            act(optimizer)
    state = pickle.loads(pickle.dumps(copy.deepcopy(optimizer.state_dict())))
    other = network()
    make(other).load_state_dict(state)
    # The model is free of the optimizer.
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert_equal(twin, model)


def test_optimizer_is_wrapped_once_and_again_after_close():
    model = network()
    base = sgd(model)
    torch.optim.lr_scheduler.StepLR(base, 10)
    seen = []
    base.register_step_pre_hook(lambda *_: seen.append("pre"))
    first = alone(model, base, "dense")
    with pytest.raises(ConfigurationError, match="distributed already"):
        alone(model, base, "dense")
    torch.optim.lr_scheduler.StepLR(first, 10)
    square(model, 0, 0).backward()
    first.step()
    first.close()
    for step in (first.step, lambda: torch.optim.SGD.step(first)):
        with pytest.raises(ClosedError):
            step()
    seen.clear()
    second = alone(model, first, "topk")
    torch.optim.lr_scheduler.StepLR(second, 10)
    for step in range(2):
        second.zero_grad()
        square(model, step, 0).backward()
        second.step()
        assert second.reducer.last_step.step == step
    assert second.reducer.compressor.id == "topk"
    assert len(seen) == 2
    assert isinstance(second, torch.optim.SGD)


def test_dropped_optimizer_is_collected():
    model = network()
    torch.optim.lr_scheduler.StepLR(sgd(model), 10)
    for patched in (False, True):
        base = sgd(model)
        if patched:
            wrapper(base, [])
        scaler = torch.amp.GradScaler("cpu")
        optimizer = alone(model, base, "topk", scaler=scaler)
        scaler.scale(square(model, 0, 0)).backward()
        scaler.step(optimizer)
        scaler.update()
        ends = [weakref.ref(made) for made in (optimizer, optimizer.reducer)]
        del base, optimizer
        gc.collect()
        assert [end() for end in ends] == [None] * 2
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        square(model, 1, 0).backward()
        model.zero_grad()
