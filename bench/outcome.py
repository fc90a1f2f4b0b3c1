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
    """Result of a training run; the same on every rank, except for ``quality``, which rank 0 has."""

    quality: float
    parameters: int
    ranks: int
    hosts: int
    # Whether compressors might change from step to step. ``compressor`` and ``collective`` then are those of the plan
    # that leads in the second half of the run; else they are what was named, and the collective that ran where it was
    # one alone
    adapts: bool
    compressor: Compressor
    collective: str
    median_step_s: float  # medians over all steps that are timed
    phases_s: dict[str, float]
    # Mean own seconds over them of choosing plans and learning from their times. Mostly a part of ``other``
    choosing_s: float
    # Over those of the second half where what is run might change: they are compared with ``own_probe``, which is of
    # that half
    late_step_s: float
    late_phases_s: dict[str, float]
    sent_bytes: int
    wire_bytes: int
    dense_wire_bytes: int
    once_bytes: int
    gain: float | None
    # The run's exchange and the fastest dense one by themselves; None where they were not asked for
    own_probe: Probe | None
    dense_probe: Probe | None
    steps_timed: int
    ratios: list[float]  # kept fraction of the whole in every step
    plans: list[Ran]  # of the run, and of its second half
    late_plans: list[Ran]
    layers: list[Layer]  # kept elements of each parameter, mean over ranks and steps
    correlations: Correlations | None = None  # correlations between ranks' gradients; None where they were not compared
    # Exchanges by which gradients, or updates, were late in the second half of the run; see `Choices.delay`. None
    # without error feedback, where what is left out does not come later
    delay: float | None = None
    # Steps from one exchange to the next, on the average. Seconds of steps are means over those of an exchange
    every: float = 1.0
    # Steps that an earlier job has made, from whose checkpoint this one went on; what is measured is of the others
    resumed_at: int = 0
    by_rank: list[RankTimes] = field(default_factory=list)  # what each rank took, in the order of ranks
    measured: Measured | None = None  # what ``mpicomp simulate`` needs; None where it was not asked for
    # The rank that the others waited for, over the steps that are timed; None where there is one rank
    slowest: Slowest | None = None
