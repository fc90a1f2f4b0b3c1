"""The sign of every element, and one mean magnitude for each layer."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from mpicomp.compressors.base_compressor import BucketParameters
from mpicomp.compressors.onebit import SignQuantiser
from mpicomp.compressors.wire_format import SIGNS
from mpicomp.registry import register


@register
@dataclass(frozen=True, repr=False)
class EFSign(SignQuantiser):
    """Scaled sign: one bit an element, and the mean magnitude of each layer of a model.

    ::

        sent = np.mean(abs(x)) * np.copysign(1, x)

    An array that is no bucket of a model counts as one layer. The lost energy of n elements is
    ``norm2(x) - norm1(x)**2 / n``, less than all, so error feedback contracts; where few elements are large it
    contracts slowly. The short blocks of `mpicomp.OneBit` also follow differences within a layer.

    Notes
    -----
    In two phases a layer has a magnitude in every rank's part of a bucket that it reaches into. A zero travels as the
    mean, by its sign bit. The paper applies the learning rate before the memory; here the residual is one of gradients,
    so an element that waits is applied at the learning rate of the step that sends it.
    """

    id: ClassVar[str] = "efsign"
    paper: ClassVar[str] = (
        "EF-SignSGD, Karimireddy et al. 2019, arXiv 1901.09847; in two phases one magnitude for a layer in each "
        "rank's part of a bucket, and the learning rate is not in the memory"
    )

    def bind_to(self, bucket: BucketParameters) -> Self:
        return replace(self, parts=tuple((size, EFSign()) for size in bucket.sizes))

    def block_of(self, numel: int) -> int:
        return max(1, -(-numel // SIGNS)) * SIGNS
