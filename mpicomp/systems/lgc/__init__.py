"""LGC: codes that a run learns from its own gradients, and the exchange of what is coded.

`compressor` has the settings and what is selected; `exchange` the three phases; `ring` and `server` how codes travel in
the two instances; `lead` whose indices are taken; `autoencoder` and `linear_code` the codes, which look as
`learned_code` says.
"""

from mpicomp.systems.lgc.compressor import LGC
from mpicomp.systems.lgc.exchange import Learned

__all__ = ["LGC", "Learned"]
