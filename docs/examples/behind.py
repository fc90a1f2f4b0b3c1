"""How many steps a training is behind another one, from their metrics.

    python docs/examples/behind.py DENSE.jsonl LATE.jsonl FIRST LAST

Both files are of ``mpicomp train --metrics``, of the same task and seed, so that the same step has the same batch.
"""

import json
import sys

import numpy as np


def steps_behind(dense, late, first, last):
    """Return by how many steps the losses of ``late`` from the first to the last step run after those of ``dense``.

    Batches differ more than steps do. So the difference of logarithms is taken step by step, and a cubic through those
    of ``dense`` says how many steps before the middle they were as much higher.
    """
    dense, late = np.log(dense), np.log(late)
    middle = (first + last) // 2
    begin = middle // 5  # losses fall in another way at first
    steps = np.arange(begin, min(2 * middle, len(dense)))
    curve = np.polynomial.Polynomial.fit(steps, dense[steps], 3)
    before = np.arange(begin, middle + 1)
    loss = curve(middle) + (late - dense)[first : last + 1].mean()
    return int(middle - before[np.abs(curve(before) - loss).argmin()])


def losses(path):
    """Read the losses of rank 0's batches."""
    with open(path) as file:
        return np.array([json.loads(line)["loss"] for line in file])


if __name__ == "__main__":
    print(steps_behind(losses(sys.argv[1]), losses(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
