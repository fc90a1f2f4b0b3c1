import numpy as np
import oracle
import pytest
from marks import slow
from mpicomp.bench.measure.feedback import Selecting, make_bucket

import mpicomp
from mpicomp.compressors.wire_format import BITS


@pytest.mark.parametrize(
    "compressor", [mpicomp.TopK(ratio=0.1, wire="q4"), slow(mpicomp.TopK(ratio=1.0, wire="q2"))], ids=str
)
def test_messages_are_rounded_to_the_wire(compressor):
    gradient = np.random.default_rng(0).laplace(size=2000).astype(np.float32)
    bucket, given = make_bucket(gradient.size, compressor, True), gradient.copy()
    count = Selecting(compressor, gradient.size).step(bucket, given, message=True)
    chosen, expected = oracle.largest(gradient, count), gradient.astype(np.float64)
    expected[chosen] -= oracle.few_bits(gradient[chosen], BITS[compressor.wire])
    ((_, residual),) = bucket.residuals()
    np.testing.assert_allclose(residual, expected, atol=1e-5)
    np.testing.assert_array_equal(given, gradient)
