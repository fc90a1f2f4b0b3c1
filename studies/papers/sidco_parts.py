"""SIDCo's smaller deviations from its paper, one by one: ``python studies/papers/sidco_parts.py``."""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import Any
from unittest import mock

import paper_runs  # first, since it has Python find the studies of the folder above

# isort: split
import estimators
import numpy as np
from numpy.typing import NDArray

from mpicomp import SIDCo
from mpicomp.cli import run_program
from mpicomp.compressors import Context, sidco
from mpicomp.compressors.base_compressor import num_kept
from mpicomp.compressors.gradient_with_residual import TRAILER, GradientWithResidual, Piece
from mpicomp.setting_checks import check_least

_STUDY = "sidco_parts"
_NUMEL = 1_000_000
_LARGE = 16_777_216  # elements, eight times those of a sample
_FEW = 1_000  # elements, of which SIDCo takes an exact top-k
_SHAPE = 0.6  # of the gamma distribution


def select(compressor: SIDCo, array: NDArray[np.float32], context: Context) -> tuple[int, float]:
    accumulated = GradientWithResidual(np.empty(array.size + TRAILER, array.dtype), None, [Piece(0, array)])
    start = time.thread_time()
    count = compressor.select(accumulated, context).indices.size
    return count, time.thread_time() - start


def laplace(random: np.random.Generator, numel: int, zeros: float = 0.0) -> NDArray[np.float32]:
    """Return Laplace noise, of which a share is zero."""
    array = random.laplace(size=numel).astype(np.float32)
    array[random.random(numel) < zeros] = 0
    return array


def with_zeros(turns: int) -> list[dict[str, Any]]:
    """Select from arrays of which nine in ten elements are zero; adapted in as many steps before."""
    rows = []
    for distribution in ("exponential", "gamma", "pareto"):
        for published in (True, False):
            random, context = np.random.default_rng(0), Context()
            make = SIDCo.as_published if published else SIDCo
            compressor = make(ratio=0.001, distribution=distribution)
            shares = [select(compressor, laplace(random, _NUMEL, 0.9), context)[0] / num_kept(0.001, _NUMEL)
                      for _ in range(2 * turns)]  # fmt: skip
            rows.append({"distribution": distribution, "published": published, "share": fmean(shares[turns:])})
    return rows


def of_few(turns: int) -> list[dict[str, Any]]:
    """Select ten of a thousand elements."""
    rows = []
    for published in (True, False):
        random, context = np.random.default_rng(1), Context()
        compressor = (SIDCo.as_published if published else SIDCo)(ratio=0.01)
        found = [select(compressor, laplace(random, _FEW), context) for _ in range(20 * turns)][turns:]
        shares = [count / num_kept(0.01, _FEW) for count, _ in found]
        rows.append({"published": published, "share": fmean(shares), "deviation": stdev(shares),
                     "us": 1e6 * median(seconds for _, seconds in found)})  # fmt: skip
    return rows


def of_many(turns: int) -> list[dict[str, Any]]:
    """Select from an array that is sampled, and from the same in whole, in turn."""
    array = laplace(np.random.default_rng(2), _LARGE)
    rows = []
    for distribution in ("exponential", "gamma"):
        contexts = {sample: Context() for sample in (sidco._SAMPLE, 1 << 40)}
        found: dict[int, list[tuple[int, float]]] = {sample: [] for sample in contexts}
        compressor = SIDCo(ratio=0.001, distribution=distribution, stages=3, indices="plain")
        for _ in range(turns + 1):
            for sample, context in contexts.items():
                with mock.patch.object(sidco, "_SAMPLE", sample):
                    found[sample].append(select(compressor, array, context))
        for sample, selected in found.items():
            rows.append({"distribution": distribution, "sample": sample < _LARGE,
                         "share": fmean(count for count, _ in selected) / num_kept(0.001, _LARGE),
                         "ms": 1e3 * median(seconds for _, seconds in selected[1:])})  # fmt: skip
    return rows


def adapting(turns: int) -> list[dict[str, Any]]:
    """Adapt stages to arrays of three kinds by the paper's rule: one number for all kinds, and one for each."""
    kinds = {kind: estimators.DISTRIBUTIONS[kind] for kind in ("laplace", "normal", "student")}
    rows = []
    for shared in (True, False):
        random, one = np.random.default_rng(3), Context()
        contexts = {kind: one if shared else Context() for kind in kinds}
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        compressor = SIDCo.as_published(ratio=0.001)
        for _ in range(4 * turns):
            for kind, draw in kinds.items():
                array = draw(random, _NUMEL).astype(np.float32)
                found[kind].append(select(compressor, array, contexts[kind])[0] / num_kept(0.001, _NUMEL))
        rows.append({"together": shared} | {kind: fmean(shares[2 * turns :]) for kind, shares in found.items()})
    return rows


def gamma_quantiles() -> list[dict[str, Any]]:
    """Compare the approximation of the gamma quantile with the exact one, by the elements above."""
    from scipy.special import gammaincc, gammainccinv, gammaln

    rows = []
    for ratio in (0.1, 0.01, 0.001):
        approximate = max(0.0, -(math.log(ratio) + gammaln(_SHAPE)))
        exact = gammainccinv(_SHAPE, ratio)
        rows.append({"ratio": ratio, "approximate": float(gammaincc(_SHAPE, approximate)) / ratio,
                     "exact": float(gammaincc(_SHAPE, exact)) / ratio})  # fmt: skip
    return rows


def _tables(
    zeros: Sequence[Any], few: Sequence[Any], many: Sequence[Any], stages: Sequence[Any], quantiles: Sequence[Any]
) -> None:
    paper_runs.show("Nine in ten elements are zero: selected over those asked for, at 0.001", zeros, {
        "distribution": "", "published": "", "share": ".2f",
    }, ["Laplace noise; here zeros are left out of the fit"])  # fmt: skip
    paper_runs.show(f"Of {_FEW} elements, at 0.01", few, {
        "published": "", "share": ".2f", "deviation": ".2f", "us": ".0f",
    }, ["deviation: of the share from step to step; here it is an exact top-k"])  # fmt: skip
    paper_runs.show(f"Of {_LARGE} elements, at 0.001, three stages and corrections", many, {
        "distribution": "", "sample": "", "share": ".3f", "ms": ".1f",
    }, ["sample: two million elements are looked at, otherwise all; of one array, in turn"])  # fmt: skip
    paper_runs.show("Stages that adapt, as published: selected over those asked for, at 0.001", stages, {
        "together": "", "laplace": ".2f", "normal": ".2f", "student": ".2f",
    }, ["together: one number of stages for arrays of all three kinds; otherwise one for each kind"])  # fmt: skip
    paper_runs.show(f"Gamma quantile: elements above it over those asked for, at a shape of {_SHAPE}", quantiles, {
        "ratio": "g", "approximate": ".2f", "exact": ".2f",
    })  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="studies/papers/sidco_parts.py", description="Show SIDCo's smaller deviations, one by one."
    )
    parser.add_argument("--turns", type=int, default=10, metavar="N", help="of each (%(default)s)")
    parser.set_defaults(alone=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure and print the tables."""
    turns = check_least(_STUDY, "--turns", arguments.turns, 2)
    _tables(with_zeros(turns), of_few(turns), of_many(turns), adapting(turns), gamma_quantiles())
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
