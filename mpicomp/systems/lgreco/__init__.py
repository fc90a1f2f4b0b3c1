"""L-GreCo: a ratio, a rank or bits for each layer, with the fewest bytes at the error of a uniform setting.

**The paper** (Alimohammadi et al. 2022, arXiv 2210.17357). Every layer gets its own setting of one compressor. Rank 0
accumulates gradients, measures the error of each layer at each candidate setting by compressing at it, and solves by
dynamic programming: fewest bytes, with a sum of errors (L2 norms, not squared) of at most alpha times that of the
uniform setting. It broadcasts the solution and repeats this every thousand steps or so.

**`LGreCo.as_published()`** takes errors from the sum of rank 0's last ten accumulated gradients, from all elements; the
limit is kept exactly, and the solution is not compared with the uniform setting, which rounding may rule out. First
adjustment and period are those of its Transformer-XL; ``"warmup": 1000`` has its dense steps. Different from the paper:
every rank solves the same problem from what rank 0 reports, in place of a broadcast of the solution, and the errors of
a matrix at all ranks come from one subspace iteration.

**Here**, without `as_published`, errors are those of all ranks, as the root of the mean square over ten steps: from
spectra for top-k, from leading singular values for PowerSGD, from packing for quantisers, of one group in eight where
layers are large. The program's capacity is one part larger for each layer, so that rounding rules out nothing, and
the solution is never larger than uniform. Another policy may give the error (``on``), and layers may mix compressors
(``families``). `layer_policy` is the policy, `layer_tables` has errors and sizes, `layer_surveys` measures.
"""

from mpicomp.systems.lgreco.layer_policy import LGreCo

__all__ = ["LGreCo"]
