"""Gradients of layers that differ, and what selections, low rank and few bits lose of each, by definition."""

import numpy as np
from oracle import kept

# Layers whose magnitudes are spread differently, some of them in a bucket of their own.
SHAPES = {"conv.weight[0]": (24, 9, 5), "flat": (3000,), "heavy": (60, 40), "bias": (12,), "even": (50, 30)}
SIZES = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
PERIODS = {"first": 12, "every": 15}


def gradients(step, rank, scale=1.0, heavy=1.0):
    """Return a rank's gradients, of which those with heavy tails are scaled once more."""
    random = np.random.default_rng((step, rank))
    out = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
    out["heavy"] = random.standard_t(2, size=SHAPES["heavy"]) * 0.3 * heavy
    out["flat"] = out["flat"] * np.where(np.arange(3000) % 50, 0.02, 2.0)
    out["even"] = np.outer(random.normal(size=50), random.normal(size=30)) + 0.1 * out["even"]
    return {name: (scale * array).astype(np.float32) for name, array in out.items()}


def lost_by_selection(array, ratio):
    squares = np.sort(np.square(array.ravel()))[::-1]
    return squares[kept(ratio, squares.size) :].sum()


def lost_by_rank(array, rank):
    matrix = array.reshape(array.shape[0], -1)
    return np.square(np.linalg.svd(matrix, compute_uv=False)[rank:]).sum()


def lost_by_bits(array, bits, bucket):
    """Squared norm of what rounding to the nearest multiple of each bucket's largest magnitude over s loses."""
    lost, points = 0.0, 2 ** (bits - 1) - 1
    for part in np.split(array.ravel(), range(bucket, array.size, bucket)):
        step = np.abs(part).max() / points or 1.0
        lost += np.square(part - step * np.round(part / step)).sum()
    return lost


def chosen(buckets):
    """Return the settings of layers, by name, out of the records."""
    layers = [bucket.compressor.get("layers") or {} for bucket in buckets]
    return {pattern.replace("[[]", "["): entry for found in layers for pattern, entry in found.items()}
