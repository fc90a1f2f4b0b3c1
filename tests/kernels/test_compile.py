import numpy as np
from mpicomp.kernels.cpu.compile import exact, kernel


@exact
def _product_and_sum(first, second, third, out):
    for i in range(out.size):
        out[i] = first[i] * second[i] + third[i]


@kernel
def _calls_it(first, second, third, out):
    _product_and_sum(first, second, third, out)


def test_product_and_sum_are_rounded_twice():
    """A fused multiply-add rounds once, and a host without it would come to other bits."""
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        first, second, third = rng.normal(size=(3, 4096)).astype(dtype)
        for function in (_calls_it, _product_and_sum):
            out = np.empty(4096, dtype)
            function(first, second, third, out)
            product = first * second
            np.testing.assert_array_equal(out, product + third)
