"""Flexible Communication: one ratio and one collective for the whole model, chosen by time and by gain.

**The paper** (Tyagi and Swany 2023, arXiv 2312.02493). AR-Topk averages a selection by a broadcast of one rank's
indices and an allreduce of the values at them; inequalities in latency, bandwidth and size name the fastest of an
allgather, a ring and a tree. The ratio is a problem of three objectives: seconds of compression, seconds of exchange,
and 1 / gain. If the gain or the network changes, each candidate ratio runs for ten steps from a checkpoint, NSGA-II
finds the front, and one of its points runs. The collectives are in `mpicomp.collectives`: star-topk and var-topk.

`Flexible.as_published` is that search (`published_search`, with NSGA-II of `pareto`). Its trials undo steps, so a
`TrialDriver` runs around the training loop: it copies and restores parameters, the optimizer's state and residuals.
Otherwise nothing is tried: gains of all ratios come from one spectrum, seconds from the cost model, and all options are
compared, dense among them (`option_policy`). docs/papers.md has all that differs.
"""

from mpicomp.systems.flexible.option_policy import Flexible
from mpicomp.systems.flexible.trials import TrialDriver, drive_trials

__all__ = ["Flexible", "TrialDriver", "drive_trials"]
