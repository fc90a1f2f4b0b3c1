"""Intervals of medians, tables of results, and the bar of progress."""

import os
import subprocess
import sys

import numba
import numpy as np
import pytest
from mpicomp.bench.measure import progress
from mpicomp.bench.measure.intervals import median_interval, ratio_interval
from scipy.stats import binom


@pytest.mark.parametrize("number", [*range(6, 40), 100, 999, 2000])
def test_interval_is_the_narrowest_of_95_percent(number):
    samples = np.random.default_rng(number).permutation(number).astype(float)
    low, high = median_interval(samples)
    below = int(low)  # samples that are smaller
    assert high == number - 1 - below
    assert 2 * binom.cdf(below, number, 0.5) <= 0.05 < 2 * binom.cdf(below + 1, number, 0.5)


def test_ratio_interval_gains_by_pairs():
    random = np.random.default_rng(0)
    held, widths, widths_unpaired = [], [], []
    for _ in range(40):
        both = random.lognormal(sigma=0.2, size=31)  # what the machine does to both of a pair
        mine, others = 1.2 * both * random.lognormal(sigma=0.1, size=31), both * random.lognormal(sigma=0.1, size=31)
        low, high = ratio_interval(mine, others)
        assert low <= np.median(mine) / np.median(others) <= high
        held.append(low <= 1.2 <= high)
        widths.append(high - low)
        low, high = ratio_interval(mine, random.permutation(others))
        widths_unpaired.append(high - low)
    assert np.mean(held) >= 0.93
    assert np.mean(widths) < 0.8 * np.mean(widths_unpaired)


WARNS = """
import sys
from mpicomp.bench.measure.progress import Progress

with Progress(True).over(2):
    print("a warning " + 10 * "that is longer than a line ", file=sys.stderr, flush=True)
"""


def test_progress_on_a_terminal_leaves_stderr_alone():
    """Open MPI gives ranks a terminal for stdout, and a pipe for stderr."""
    terminal, stdout = os.openpty()
    done = subprocess.run([sys.executable, "-c", WARNS], stdout=stdout, stderr=subprocess.PIPE, text=True, check=True)
    os.close(stdout)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert done.stderr.count("that is longer than a line ") == 10
    assert "training" in shown
    assert "a warning" not in shown


@pytest.mark.parametrize(("patience_s", "lines"), [(0.0, 1), (1e9, 0)])
def test_progress_tells_once_of_long_compilation(monkeypatch, capsys, patience_s, lines):
    monkeypatch.setattr(progress, "_COMPILING_S", patience_s)
    with progress.Progress(True).over(1):
        for function in (lambda number: number + 1, lambda number: number + 2):
            numba.njit(function)(1)
    numba.njit(lambda number: number + 3)(1)
    assert capsys.readouterr().out.count("compiling kernels") == lines
