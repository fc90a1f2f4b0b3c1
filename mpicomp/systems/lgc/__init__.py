"""LGC, Learned Gradient Compression: the largest values travel in a code that the run learns from its own gradients.

**The paper** (Abrahamyan et al. 2021, arXiv 2103.08870). Training has three phases. First gradients travel dense; then
the largest values of each layer travel as they are, and an autoencoder learns a code from them; from then on they
travel in that code, a quarter as long. In the ring instance each rank encodes its values at one rank's indices, and the
mean of the codes is decoded; in the server instance one rank's code is decoded by another decoder for each rank, and
the largest errors travel as innovations. The first layer is dense, and the last one is not coded.

**`LGC.as_published()`** has the paper's phases (200 and 300 steps), ratio (0.001), channels and plain descent at 0.001.
Every rank sends its own largest values in the second phase, and the code learns from these; the first layer is dense
whatever its size; decoded values are delivered as they are; residuals forget what the code has lost. So two laws do not
hold in the third phase: that nothing is lost, and that what ranks have sent adds up to their number times the mean.
Different from the paper, which does not print them or would have ranks wait for one: values divided by their root mean
square and losses as shares of energy, so that the rate fits gradients of any size; a rectifier less; no fixed server or
leader; exact values as innovations; the code of indices.

**Here**, without `as_published`:

- Phases of 50 and 150 steps, a ratio of 0.01, and channels of 8 and 16: for models of some million parameters and runs
  of some hundred steps. Adam trains the network.
- One rank's indices count in the second phase, too: the code learns from values of all ranks at the same places.
- The first layer is dense only where it has less than a hundredth of the parameters; with fewer than three layers all
  are coded.
- The residual keeps what the code has lost. Each rank has sent what the decoder, as the affine map that it is around
  the mean of codes, makes of its own code, so that nothing is lost over all ranks. Decoded values are scaled by the
  factor that leaves the least, which takes a round of some bytes: no step keeps more than there was.
- Values are divided by their root mean square on the leading rank, a number for each layer, and by their signs there.
- In the server instance another rank encodes at each step, and every rank decodes for all. An innovation is an exact
  value where decoding is most wrong.
- There is no momentum correction: the paper's text mentions it, its algorithms do not have it.

`compressor` has the settings and the selection; `exchange` the three phases; `ring` and `server` the two instances;
`leader_message` the message of the leading rank; `autoencoder` and `linear_code` the codes, by `learned_code`.
"""

from mpicomp.systems.lgc.compressor import LGC
from mpicomp.systems.lgc.exchange import Learned

__all__ = ["LGC", "Learned"]
