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


def chosen_step(gradients, residuals, select, leader):
    """One step of AR-Topk: ``select`` gives a rank's indices, ``leader`` the rank whose indices are taken."""
    accumulated = [np.asarray(g, np.float64) + r for g, r in zip(gradients, residuals, strict=True)]
    selected = [select(array) for array in accumulated]
    mean = np.zeros(accumulated[0].size)
    left = [a.copy() for a in accumulated]
    for index in selected[leader(accumulated, selected)]:
        mean[index] = sum(array[index] for array in accumulated)
        for array in left:
            array[index] = 0.0
    return mean / len(accumulated), left


def loudest(accumulated, selected):
    """The rank whose selected values have the largest energy; the first of equal ones."""
    energies = [sum(array[i] ** 2 for i in indices) for array, indices in zip(accumulated, selected, strict=True)]
    return energies.index(max(energies))


def ring_step(arrays, behind=4):
    """The mean of a ring, in the arrays' precision: part p of N is summed from rank p on, and once round.

    So many numbers travel behind the array.
    """
    numel, ranks = len(arrays[0]), len(arrays)
    number = arrays[0].dtype.type
    least, more = divmod(numel + behind, ranks)
    mean = np.empty(numel, number)
    start = 0
    for part in range(ranks):
        stop = start + least + (part < more)
        for index in range(start, min(stop, numel)):
            total = arrays[part][index]
            for step in range(1, ranks):
                total = total + arrays[(part + step) % ranks][index]
            mean[index] = total * number(1 / ranks)
        start = stop
    return mean


def doubling_step(arrays):
    """The mean of recursive doubling, in the arrays' precision, by a table of who holds what."""
    ranks = len(arrays)
    number = arrays[0].dtype.type
    core = max(power for power in (1, 2, 4, 8, 16, 32, 64) if power <= ranks)
    held = [arrays[rank] + arrays[rank + core] if rank + core < ranks else arrays[rank] for rank in range(core)]
    distance = 1
    while distance < core:
        held = [held[rank] + held[rank ^ distance] for rank in range(core)]
        distance *= 2
    return held[0] * number(1 / ranks)


def hierarchical_topk_step(gradients, residuals, layout, ratio):
    """One step of top-k among hosts: the mean, and each host's residual (the sum of its ranks'), in float64."""
    hosts = sorted(set(layout))
    sums = {host: np.zeros(len(gradients[0])) for host in hosts}
    for host, gradient in zip(layout, gradients, strict=True):
        sums[host] += gradient
    for host in hosts:
        sums[host] += residuals[host]
    numel = len(gradients[0])
    owners = min(layout.count(host) for host in hosts)
    least, more = divmod(numel, owners)
    lengths = [least + (owner >= owners - more) for owner in range(owners)]  # the last slices are the longer ones
    mean = np.zeros(numel)
    for host in hosts:
        start = 0
        for length in lengths:
            if length:
                part = sums[host][start : start + length].copy()
                for index in largest(part, kept(ratio, length)):
                    mean[start + index] += part[index]
                    sums[host][start + index] = 0.0
            start += length
    return mean / len(gradients), sums


class Oktopk:
    """Ok-Topk with error feedback, step by step; ``events`` lists what became of the threshold."""

    def __init__(self):
        self.threshold = None
        self.exchanges = 0
        self.events = []

    def step(self, gradients, residuals, select):
        """One step: the mean and the new residuals, in float64."""
        accumulated = [np.asarray(g, np.float64) + r for g, r in zip(gradients, residuals, strict=True)]
        selected = [select(array) for array in accumulated]
        means = {}
        for array, indices in zip(accumulated, selected, strict=True):
            for index in indices:
                means[index] = means.get(index, 0.0) + array[index] / len(accumulated)
        total = sum(len(indices) for indices in selected)
        k = max(math.floor(total / len(selected) + 0.5), min(total, 1))
        final = self._final(means, k)
        self.exchanges += 1
        mean = np.zeros(accumulated[0].size)
        for index in final:
            mean[index] = means[index]
        left = [a.copy() for a in accumulated]
        for array, indices in zip(left, selected, strict=True):
            for index in indices:
                if index in final:
                    array[index] = 0.0
        return mean, left

    def _final(self, means, k):
        final = set()
        if self.threshold is not None:
            final = {index for index, value in means.items() if abs(value) >= self.threshold}
        if means and (self.exchanges % 32 == 0 or not k / 2 <= len(final) <= 2 * k):
            self.threshold = sorted((abs(value) for value in means.values()), reverse=True)[k - 1]
            self.events.append("found")
            return {index for index, value in means.items() if abs(value) >= self.threshold}
        if len(final) > 4 * k / 3:
            self.threshold *= 1.008
            self.events.append("raised")
        elif len(final) < 2 * k / 3:
            self.threshold /= 1.008
            self.events.append("lowered")
        return final


def region_bounds(selected, numel):
    """Boundaries of regions: the means of what every rank would cut its own indices at."""
    ranks = len(selected)
    cuts = [[indices[place * len(indices) // ranks] for place in range(1, ranks)] for indices in selected if indices]
    return [0, *(math.floor(sum(column) / len(cuts)) for column in zip(*cuts, strict=True)), numel]


def scaled_signs(array, block):
    """Every element's sign, times the mean magnitude of its block, which travels in float32."""
    out = np.empty(len(array))
    for start in range(0, len(array), block):
        part = [float(value) for value in array[start : start + block]]
        scale = float(np.float32(sum(abs(value) for value in part) / len(part)))
        for place, value in enumerate(part):
            out[start + place] = math.copysign(scale, value)
    return out


def two_phase_step(gradients, residuals, block):
    """One step of signs in two phases: the mean, and the new residuals, in float64."""
    accumulated = [np.asarray(g, np.float64) + r for g, r in zip(gradients, residuals, strict=True)]
    numel, ranks = accumulated[0].size, len(accumulated)
    mean, left = np.zeros(numel), [np.zeros(numel) for _ in accumulated]
    least, more = divmod(numel, ranks)
    start = 0
    for owner in range(ranks):
        part = slice(start, start + least + (owner < more))
        total = accumulated[owner][part].copy()
        for rank, array in enumerate(accumulated):
            if rank != owner:
                seen = scaled_signs(array[part], block)
                total += seen
                left[rank][part] = array[part] - seen
        exact = total / ranks
        mean[part] = scaled_signs(exact, block)
        left[owner][part] = ranks * (exact - mean[part])
        start = part.stop
    return mean, left


def levels_of(values, bits):
    """The levels of a block of few-bit values: from the mean of those nearest to the least one to the largest ones'."""
    magnitudes, last = np.abs(np.asarray(values, np.float64)), 2 ** (bits - 1) - 1
    laid = [magnitudes.min() + (magnitudes.max() - magnitudes.min()) * (j / last) ** 2 for j in range(last + 1)]
    nearest = [np.argmin([abs(magnitude - level) for level in laid]) for magnitude in magnitudes]
    low = [magnitude for magnitude, j in zip(magnitudes, nearest, strict=True) if j == 0]
    high = [magnitude for magnitude, j in zip(magnitudes, nearest, strict=True) if j == last]
    base = np.float32(sum(low) / len(low))
    end = sum(high) / len(high) if high else sum(low) / len(low)
    step = np.float32((end - float(base)) / last**2)
    return [float(base) + j**2 * float(step) for j in range(last + 1)]


def few_bits(values, bits):
    """Every value's sign, times the nearest level of its block of 256."""
    out = []
    for start in range(0, len(values), 256):
        part = values[start : start + 256]
        levels = levels_of(part, bits)
        for value in part:
            place = np.argmin([abs(abs(float(value)) - level) for level in levels])
            out.append(math.copysign(levels[place], float(value)))
    return np.array(out)
