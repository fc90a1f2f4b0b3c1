"""What a training run has come to."""

from dataclasses import dataclass, field

from mpicomp.bench.measure.chosen_plans import Layer, Ran
from mpicomp.bench.measure.correlation import Correlations
from mpicomp.bench.measure.probe import Probe
from mpicomp.bench.measure.slowest import Slowest
from mpicomp.bench.measure.timings import RankTimes
from mpicomp.bench.simulate.measured import Measured

from mpicomp.compressors import Compressor


@dataclass
class Outcome:
    """Result of a training run; the same on every rank, except for ``quality``, which rank 0 has.

    Attributes
    ----------
    adapts : bool
        Whether compressors might change from step to step. ``compressor`` and ``collective`` then are those of the
        plan that leads in the second half of the run; else they are what was named, and the collective
        that ran where it was one alone.
    median_step_s, phases_s : float, dict of str to float
        Medians over all steps that are timed.
    choosing_s : float
        Mean own seconds over them of choosing plans and learning from their times. Mostly a part of ``other``.
    late_step_s, late_phases_s : float, dict of str to float
        Over those of the second half where what is run might change: they are compared with ``own_probe``, which is of
        that half.
    own_probe, dense_probe : Probe or None
        The run's exchange and the fastest dense one by themselves; None where they were not asked for.
    ratios : list of float
        Kept fraction of the whole in every step.
    plans, late_plans : list of Ran
        Of the run, and of its second half.
    layers : list of Layer
        Kept elements of each parameter, mean over ranks and steps.
    correlations : Correlations or None
        Correlations between ranks' gradients; None where they were not compared.
    delay : float or None
        Exchanges by which gradients, or updates, were late in the second half of the run; see `Choices.delay`. None
        without error feedback, where what is left out does not come later.
    every : float
        Steps from one exchange to the next, on the average. Seconds of steps are means over those of an exchange.
    resumed_at : int
        Steps that an earlier job has made, from whose checkpoint this one went on; what is measured is of the others.
    by_rank : list of RankTimes
        What each rank took, in the order of ranks.
    measured : Measured or None
        What ``mpicomp simulate`` needs; None where it was not asked for.
    slowest : Slowest or None
        The rank that the others waited for, over the steps that are timed; None where there is one rank.
    """

    quality: float
    parameters: int
    ranks: int
    hosts: int
    adapts: bool
    compressor: Compressor
    collective: str
    median_step_s: float
    phases_s: dict[str, float]
    choosing_s: float
    late_step_s: float
    late_phases_s: dict[str, float]
    sent_bytes: int
    wire_bytes: int
    dense_wire_bytes: int
    once_bytes: int
    gain: float | None
    own_probe: Probe | None
    dense_probe: Probe | None
    steps_timed: int
    ratios: list[float]
    plans: list[Ran]
    late_plans: list[Ran]
    layers: list[Layer]
    correlations: Correlations | None = None
    delay: float | None = None
    every: float = 1.0
    resumed_at: int = 0
    by_rank: list[RankTimes] = field(default_factory=list)
    measured: Measured | None = None
    slowest: Slowest | None = None
