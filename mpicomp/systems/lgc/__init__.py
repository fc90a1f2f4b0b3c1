"""LGC, Learned Gradient Compression: the largest values travel in a code that the run learns from its own gradients.

**The paper** (Abrahamyan et al. 2021, arXiv 2103.08870). Training has three phases. First gradients travel dense; then
the largest values of each layer travel uncoded, and an autoencoder learns a code from them; from then on they
travel in that code, a quarter as long. In the ring instance each rank encodes its values at one rank's indices, and the
mean of the codes is decoded; in the server instance one rank's code is decoded by another decoder for each rank, and
the largest errors travel as innovations. The first layer is dense, and the last one is not coded.

docs/papers.md has all that differs here. As published decoded values are delivered unscaled and residuals omit the
code's error, so two laws do not hold in the third phase: that nothing is lost, and that the ranks' messages add up to
their number times the mean.

`compressor` has the settings and the selection; `exchange` the three phases; `ring` and `server` the two instances;
`leader_message` the message of the leading rank; `autoencoder` the code.
"""

from mpicomp.systems.lgc.compressor import LGC
from mpicomp.systems.lgc.exchange import Learned

__all__ = ["LGC", "Learned"]
