"""Flexible Communication: one ratio and one collective for the whole model, chosen by time and by gain.

**The paper** (Tyagi and Swany 2023, arXiv 2312.02493). AR-Topk averages a selection by a broadcast of one rank's
indices and an allreduce of the values at them; inequalities in latency, bandwidth and size name the fastest of an
allgather, a ring and a tree. The ratio is a problem of three objectives: seconds of compression, seconds of exchange,
and 1 / gain. If the gain or the network changes, each candidate ratio runs for ten steps from a checkpoint, NSGA-II
finds the front, and one of its points runs. The collectives are in `mpicomp.collectives`: star-topk and var-topk.

**`Flexible.as_published()`** is that search (`published_search`, with NSGA-II of `pareto`). Its trials undo steps, so a
`TrialDriver` runs around the training loop: it copies and restores parameters, the optimizer's state and residuals.
`drive_trials` returns that of PyTorch, and `mpicomp train` calls it. Different from the paper:

- Links are measured by this library. The tree is recursive doubling, half of the cost in the formula.
- The gain is that of all ranks' squared norms.
- The first search chooses, where the paper's code waits for the network to change.
- Objectives are interpolated over the logarithm of the ratio; the ratio is rounded to one of four for each ``factor``.
- Residuals and the optimizer's state are restored, too, and residuals begin at zero.
- Indices are coded, unless the compressor is set otherwise; the formulas count them in 32 bits.

Dense is no candidate then: a step may be slower than dense.

**Here**, without `as_published`, nothing is tried: gains of all ratios come from one spectrum, seconds from the cost
model, which holds both of the paper's times; all options are compared, dense among them (`option_policy`).
"""

from mpicomp.systems.flexible.option_policy import Flexible
from mpicomp.systems.flexible.trials import TrialDriver, drive_trials

__all__ = ["Flexible", "TrialDriver", "drive_trials"]
