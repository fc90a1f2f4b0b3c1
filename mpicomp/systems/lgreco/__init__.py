"""L-GreCo: a ratio, a rank or bits for each layer, with the fewest bytes at the error of a uniform setting.

**The paper** (Alimohammadi et al. 2022, arXiv 2210.17357). Every layer gets its own setting of one compressor. Rank 0
accumulates gradients, measures the error of each layer at each candidate setting by compressing at it, and solves by
dynamic programming: fewest bytes, with a sum of errors (L2 norms, not squared) of at most alpha times that of the
uniform setting. It broadcasts the solution and repeats this every thousand steps or so.

Here every rank solves the same problem, errors are those of all ranks as the root of the mean square over ten steps,
and another policy may give the error (``on``). docs/papers.md has all that differs, as published too.
"""

from mpicomp.systems.lgreco.lgreco import LGreCo

__all__ = ["LGreCo"]
