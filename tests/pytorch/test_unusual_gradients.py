"""Gradients that cannot be averaged where they are, and a package without PyTorch: refused by name."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from replicas import distribute, network, sgd, square, train

import mpicomp
from mpicomp.errors import ArrayTypeError, ConfigurationError
from mpicomp.mpi import LocalWorld


@pytest.mark.mpi(max_size=2)
def test_expanded_gradient_is_refused_by_name_on_all(comm):
    model = network()
    optimizer = distribute(model, comm, sgd(model))
    train(model, optimizer, range(2), comm.rank)
    before = model[0].weight.detach().clone()
    optimizer.zero_grad()
    square(model, 2, comm.rank).backward()
    if comm.rank == comm.size - 1:
        model[0].weight.grad = torch.ones(()).expand_as(model[0].weight)
    with pytest.raises(ConfigurationError, match=r"the gradient of '0\.weight' is expanded.*\.contiguous\(\)"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)
    train(model, optimizer, range(3, 5), comm.rank)


def test_masked_arrays_are_refused_by_name():
    end = LocalWorld(1).transports[0]
    masked = np.ma.masked_array(np.ones(3, np.float32), [0, 1, 0])
    with mpicomp.Reducer("dense", comm=end) as reducer:
        with pytest.raises(ArrayTypeError, match=r"'w' is a masked array.*filled\(0\)"):
            reducer.reduce({"w": masked})
        reducer.reduce({"w": masked.filled(0)})
    for settings in ({}, {"error": 0.1}):
        with pytest.raises(ArrayTypeError, match=r"is a masked array.*filled\(0\)"):
            mpicomp.allreduce(masked, comm=end, **settings)


class OfSamples(torch.optim.Optimizer):
    """Like opacus' DPOptimizer."""

    def __init__(self, optimizer):
        self.original_optimizer = optimizer
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults

    def clip_and_accumulate(self):
        """Compute gradients."""


def test_optimizer_that_computes_gradients_in_its_step_is_wrapped_inside():
    model, wrap = network(), mpicomp.torch.DistributedOptimizer
    outer, end = OfSamples(sgd(model)), LocalWorld(1).transports[0]
    inside = r"optimizer.original_optimizer = DistributedOptimizer\(optimizer.original_optimizer, model\)"
    with pytest.raises(ConfigurationError, match=f"OfSamples computes .grad.*{inside}"):
        wrap(outer, model, comm=end)
    outer.original_optimizer = wrap(outer.original_optimizer, model, comm=end)
    outer.original_optimizer.close()


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import mpicomp
for load in (lambda: mpicomp.torch, lambda: __import__("mpicomp.torch")):
    try:
        load()
    except ModuleNotFoundError as error:
        print(error.name, error)
"""


def test_import_without_torch_names_the_extra():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch mpicomp.torch needs PyTorch") == 2
    assert done.stdout.count("pip install 'mpicomp[torch]'") == 2
