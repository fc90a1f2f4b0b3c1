"""Steps of reducers whose arrays are on a device, by a stand-in, and the same steps on the host."""

import numpy as np
from device import fake_cuda
from worlds import Ranks

from mpicomp.errors import MpicompError


def gradients_of(rank, step, shapes, dtype=np.float32):
    rng = np.random.default_rng([rank, step])
    return {name: rng.laplace(size=shape).astype(dtype) for name, shape in shapes.items()}


def host(array):
    """Leave an array where it is: takes the place of a copy to the device."""
    return array


def on_host(array):
    """Return a copy of an array on the host."""
    return array.get() if isinstance(array, fake_cuda.ndarray) else array.copy()


def fetched(means):
    """Return the means of each rank on the host."""
    return [{name: on_host(mean) for name, mean in rank.items()} for rank in means]


def reduced(ranks, gradients, move):
    """Reduce gradients that ``move`` copies to where they are to be; return the means of each rank."""
    return ranks.reduce([{name: move(gradient) for name, gradient in rank.items()} for rank in gradients])


def ranks_of(size, compressor, collective=None, **settings):
    """Make reducers with feedback where the compressor allows it."""
    feedback = None if compressor.contractive else False
    return Ranks(size, compressor, *([collective] if collective else []), feedback=feedback, **settings)


def stepped(ranks, gradients, move):
    """Return the means and the residuals of a step, or its error."""
    try:
        means = fetched(reduced(ranks, gradients, move))
    except MpicompError as error:
        return str(error), type(error.__cause__)
    assert all(means[0][name].dtype == gradient.dtype for name, gradient in gradients[0].items())
    return means, [ranks.residuals(name) for name in gradients[0]]


def compare_steps(make, move, shapes, steps, change=None, dtype=np.float32):
    """Step with ranks on the device and on the host, and compare all results; return the ranks on the device.

    ``make`` makes the ranks, and ``change`` changes the gradients of a step.
    """
    there, here = make(), make()
    for step in range(steps):
        gradients = [gradients_of(rank, step, shapes, dtype) for rank in range(len(here.reducers))]
        if change is not None:
            change(step, gradients)
        np.testing.assert_equal(stepped(there, gradients, move), stepped(here, gradients, host))
    return there
