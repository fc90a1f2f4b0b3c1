"""A threshold from a sample, with momentum correction and a ratio that falls at the beginning."""

import math
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from operator import mul
from typing import ClassVar, Self

import numpy as np

from mpicomp import kernels
from mpicomp.compressors.base_compressor import BucketParameters, Entry, num_kept
from mpicomp.compressors.context import Context
from mpicomp.compressors.estimator import Search
from mpicomp.compressors.gradient_with_residual import GradientWithResidual
from mpicomp.compressors.kinds import Sparsifier
from mpicomp.compressors.wire_format import Selection
from mpicomp.errors import ConfigurationError
from mpicomp.kernels import cpu
from mpicomp.registry import register
from mpicomp.setting_checks import check_choice, check_least, check_range

_FEW = 0.8  # times k; with fewer than that the threshold is lowered
_LOWER = 0.8  # factor by which the threshold is lowered
_CORRECTIONS = 10  # times that the threshold may be lowered in a step


@register
@dataclass(frozen=True, repr=False)
class DGC(Sparsifier):
    """Deep Gradient Compression (arXiv 1712.01887): a threshold from a sample, momentum correction, clipping, warm-up.

    ::

        sample = np.sort(abs(x[start::stride]))
        threshold = sample[-round(ratio * sample.size)]
        sent = np.where(abs(x) > threshold, x, 0)

    The exact top-k of a strided sample sets the threshold. Where fewer than 0.8 k elements exceed it, it is multiplied
    by 0.8, at most ten times; where more than k do, exactly the k largest are sent.

    Parameters
    ----------
    ratio : float
        Kept fraction in (0, 1] after the warm-up; k is the nearest integer to ``ratio * numel``, at least 1.
    sample : float
        Fraction of the elements in the sample, but at least ``2 / ratio`` elements. If that is every third or more, or
        the ratio is 1, the selection is exact.
    momentum : float
        If not 0, momentum is applied before the residual (momentum correction), and the optimizer must not apply it
        again.
    nesterov : bool
        Whether that is Nesterov's form.
    masking : bool
        Whether the velocity of sent elements is set to zero (momentum factor masking).
    clip : float or None
        Each rank first scales its gradients down to an L2 norm of at most ``clip / sqrt(ranks)``.
    warmup_steps : int
        At step s of the warm-up, from 0 on, the ratio is ``ratio ** ((s + 1) / (warmup_steps + 1))``.
    wire, indices
        See `Sparsifier`.

    Notes
    -----
    Different from the paper and its published code:

    - Momentum correction is off unless asked for, and clipping is by the norm of all of a rank's gradients.
    - At most k elements are sent, the largest. Published code sends the first k of up to 1.3 k candidates in the order
      of indices, so that elements at the end of an array lose whatever their size.
    - The warm-up is counted in steps; biases and other vectors are part of their bucket and compressed like the rest.
    - The sample's stride is odd, so that it does not stay within a few columns of a matrix.
    - With infinities or NaN, or with a sample of too few nonzero elements, exactly the k largest are sent. Of an array
      of zeros nothing is sent.

    Examples
    --------
    >>> compressor = DGC(ratio=0.001, warmup_steps=2)
    >>> [round(compressor.ratio_at(step), 4) for step in range(4)]
    [0.1, 0.01, 0.001, 0.001]
    """

    id: ClassVar[str] = "dgc"
    paper: ClassVar[str] = "Lin et al. 2018, arXiv 1712.01887; at most k elements, the largest; momentum off by default"

    ratio: float = 0.01
    sample: float = 0.01
    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = True
    clip: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sample", "momentum"):
            self._set(**{name: check_range("dgc", name, getattr(self, name), 0, 1)})
        for name in ("nesterov", "masking"):
            check_choice("dgc", name, getattr(self, name), (True, False))
            self._set(**{name: bool(getattr(self, name))})
        if self.clip is not None:
            self._set(clip=check_range("dgc", "clip", self.clip, 0, math.inf))
            if self.clip == 0:
                raise ConfigurationError("dgc: clip must be above 0, or None; at 0 nothing would ever be sent")
        check_least("dgc", "warmup_steps", self.warmup_steps, 0)

    @property
    def entry(self) -> Entry:
        return Entry(self.clip, self.momentum, self.nesterov, self.masking)

    def ratio_at(self, step: int) -> float:
        """Return the kept fraction of a step."""
        if step >= self.warmup_steps:
            return self.ratio
        return float(self.ratio ** ((step + 1) / (self.warmup_steps + 1)))

    def bind_to(self, bucket: BucketParameters) -> Self:
        return self if bucket.warm_up else replace(self, warmup_steps=0)

    def select(self, accumulated: GradientWithResidual, context: Context) -> Selection:
        ratio = self.ratio_at(context.step)
        search = Search("dgc", accumulated, context, num_kept(ratio, accumulated.numel))
        size = math.ceil(max(self.sample * search.numel, min(search.numel, 2 / ratio)))
        stride = max(1, search.numel // size - 1) | 1
        if stride == 1 or search.k == search.numel:
            return search.largest()
        threshold = self._estimate(accumulated, stride, ratio, context)
        if not accumulated.finite:
            return search.largest()
        search.foresee(accumulate(repeat(_LOWER, _CORRECTIONS), mul, initial=threshold))
        count = search.count(threshold, search.k + 1)
        for _ in range(_CORRECTIONS):
            if count >= _FEW * search.k:
                break
            threshold *= _LOWER
            count = search.count(threshold, search.k + 1)
        return search.largest() if count > search.k else search.above(threshold)

    def _estimate(self, accumulated: GradientWithResidual, stride: int, ratio: float, context: Context) -> float:
        """Return the smallest of a sample's largest magnitudes."""
        start = int(context.random(shared=False).integers(stride))
        sample = accumulated.array()[start::stride]
        magnitudes = context.workspace.array("dgc.sample", sample.size, sample.dtype)
        np.abs(sample, out=magnitudes)
        [bits] = accumulated.to_host(kernels.kth_magnitude(magnitudes, num_kept(ratio, sample.size)))
        return cpu.magnitude_of(bits, sample.dtype)
