"""Slow and obvious: what the library must agree with. Written from the definitions, with Python's own loops."""

import math

import numpy as np


def largest(array, k):
    """Indices of the k largest magnitudes: ties to the lowest index, NaN above infinity above the rest; ascending."""

    def rank(index):
        magnitude = abs(float(array[index]))
        return (0, 0.0) if math.isnan(magnitude) else (1, -magnitude)

    return sorted(sorted(range(len(array)), key=lambda index: (rank(index), index))[:k])


def kept(ratio, numel):
    return min(numel, max(1, math.floor(ratio * numel + 0.5)))


def topk_step(gradients, residuals, ratio):
    """One step of top-k with error feedback, all ranks' own indices: the mean and the new residuals, in float64."""
    accumulated = [np.asarray(g, np.float64) + r for g, r in zip(gradients, residuals, strict=True)]
    mean = np.zeros(accumulated[0].size)
    left = [a.copy() for a in accumulated]
    for rank, array in enumerate(accumulated):
        for index in largest(array, kept(ratio, array.size)):
            mean[index] += array[index]
            left[rank][index] = 0.0
    return mean / len(accumulated), left


def star_topk_step(gradients, residuals, ratio, step):
    """One step of AR-Topk with the indices of rank (step mod ranks)."""
    accumulated = [np.asarray(g, np.float64) + r for g, r in zip(gradients, residuals, strict=True)]
    chosen = accumulated[step % len(accumulated)]
    mean = np.zeros(chosen.size)
    left = [a.copy() for a in accumulated]
    for index in largest(chosen, kept(ratio, chosen.size)):
        mean[index] = sum(array[index] for array in accumulated)
        for array in left:
            array[index] = 0.0
    return mean / len(accumulated), left
