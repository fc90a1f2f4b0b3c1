import numpy as np
import pytest

from mpicomp import Uniform


@pytest.mark.parametrize("bits", range(1, 9))
def test_what_contracts(bits):
    for bucket in (64, 128, 256, 512, 1 << 17, 1 << 20):
        for rounding in ("stochastic", "nearest"):
            compressor = Uniform(bits=bits, bucket=bucket, rounding=rounding)
            assert compressor.contractive == (bucket < 2 * (2**bits - 1) ** 2)
            assert compressor.feedback == (rounding == "nearest" and compressor.contractive)
            assert compressor.contractive_variant.contractive
            assert (compressor.contractive_variant is compressor) == compressor.contractive


@pytest.mark.parametrize(("bits", "bucket"), [(3, 64), (4, 256), (8, 4096)])
def test_the_worst_bucket_loses_what_the_class_says_and_no_more(bits, bucket):
    """Two ends on both sides of zero, and all others half a step from a point, as near to zero as that goes."""
    steps = 2**bits - 1
    array = np.full(bucket, 0.0)  # half a step from the two points beside it, since the number of steps is odd
    array[:2] = (-1.0, 1.0)
    message, sent = np.empty(Uniform(bits=bits, bucket=bucket).packed_bytes(bucket), np.uint8), np.empty(bucket)
    lost = Uniform(bits=bits, bucket=bucket).pack(array, message, sent, 0)
    assert lost == pytest.approx((bucket - 2) * (2 / steps) ** 2 / 4, rel=1e-4)
    assert lost < np.square(array).sum()
