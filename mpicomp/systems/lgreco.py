"""L-GreCo: a ratio, a rank or bits for each layer, with the fewest bytes at the error of a uniform setting.

**The paper** (Alimohammadi et al. 2022, arXiv 2210.17357). Every layer gets its own setting of one compressor. Rank 0
accumulates gradients, measures the error of each layer at each candidate setting by compressing at it, and solves by
dynamic programming: fewest bytes, with a sum of errors (L2 norms, not squared) of at most alpha times that of the
uniform setting. It broadcasts the solution and repeats this every thousand steps or so.

Here every rank solves the same problem, errors are those of all ranks as the root of the mean square over ten steps,
and another policy may give the error (``on``). docs/papers.md has all that differs, as published too.
"""

import glob
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives import fitting
from mpicomp.compressors import Compressor, get_compressor
from mpicomp.compressors.base_compressor import match_layer_setting, num_kept
from mpicomp.compressors.kinds import Quantiser, packers
from mpicomp.compressors.powersgd import Matrix, orthogonalize
from mpicomp.compressors.quantize import MOST_BITS
from mpicomp.compressors.wire_format import message_bytes
from mpicomp.cost import CostModel
from mpicomp.errors import ConfigurationError
from mpicomp.gpu import Device, current_device, to_python
from mpicomp.policies import get_policy
from mpicomp.policies.adaptive import Adaptive
from mpicomp.policies.plan_tradeoff import least_total, total
from mpicomp.policies.policy import BucketOutcome, Shape, StepReport, UserSettings
from mpicomp.policies.ratio_levels import at_ratio, ladder
from mpicomp.policies.surveys import WHOLE, Spectra, SpectrumSurvey, Survey
from mpicomp.registry import register
from mpicomp.rounds import Rounds
from mpicomp.setting_checks import check_choice, check_flag, check_least, check_range
from mpicomp.transport.base import Transport
from mpicomp.workspace import Workspace

__all__ = ["LGreCo"]

_STRIDE = 8  # a survey of selections or bits reads one group of elements in so many
_EXTRA_DIRECTIONS = 4  # that make the requested ones more exact
_ITERATIONS = 3  # of a subspace iteration
_SURVEYED_STEPS = 10  # before an adjustment
_RATIO_SPAN = 8.0  # factor from the uniform ratio to the smallest and the largest candidate
_SPAN = 2.0  # the same for ranks and bits

Column = NDArray[Any]  # settings of one layer, ascending: ratios, ranks or bits
SurveyChoice = tuple[Survey | None, Survey | None]  # of the inner policy, and of this one


@register
@dataclass(eq=False)
class LGreCo(Adaptive):
    """Gives each layer its own ratio (top-k), rank (PowerSGD) or bits (QSGD, uniform), adjusted every few steps.

    Of the candidates of all layers it takes those with the fewest bytes whose errors add up to at most ``alpha`` times
    the error of the uniform setting, which is that of the named compressor. Errors are rounded to 10,000 parts of this
    limit. Until the first adjustment every layer has the uniform setting: top-k selects in every layer by itself from
    the first step on. Vectors, and matrices that PowerSGD does not compress, travel as without this policy.

    With ``on`` another policy runs inside, and the error of its choice replaces that of the uniform setting. It gets
    the gains of the adjusted settings, which have about the same error. Buckets that it sends dense stay dense. A
    change of its choice runs unadjusted for one step.

    Parameters
    ----------
    alpha : float
        Share of the uniform error that is allowed, above 0.
    every : int
        Steps between adjustments, at least 2.
    first : int
        Steps before the first adjustment, at least 2.
    span : float or None
        Factor from the uniform setting down and up to the last candidates, at least 1. None is 8 for ratios and 2 for
        ranks and bits; with ``on`` 4 for ranks.
    on : str, mapping or None
        Name or configuration of a policy that chooses a setting of the compressor for each bucket, such as
        ``"gravac"``.
    error : {"mean", "sum"}
        ``"mean"``: root of the mean square over ten steps. ``"sum"``: error of the sum of ten accumulated gradients on
        each rank, which takes an array as long as the gradient.
    published : bool
        Set by `as_published`.
    """

    id: ClassVar[str] = "lgreco"
    paper: ClassVar[str] = (
        "L-GreCo, Alimohammadi et al. 2022, arXiv 2210.17357; errors of all ranks from spectra (top-k), a subspace "
        "iteration (PowerSGD) or packing (quantisers), the mean square of ten steps in place of the sum's, the "
        "program's capacity is one part a layer larger, never larger than uniform"
    )
    resumes: ClassVar[bool] = False

    alpha: float = 1.0
    every: int = 50
    first: int = 20
    span: float | None = None
    on: str | Mapping[str, Any] | None = None
    error: str = "mean"
    published: bool = field(default=False, kw_only=True)

    @classmethod
    def as_published(cls, **settings: Any) -> Self:
        """Return the paper's L-GreCo, as for its Transformer-XL, but for ``settings``."""
        values: dict[str, Any] = {"published": True, "error": "sum", "first": 1000, "every": 1000}
        return cls.from_config(values | settings)

    def check(self) -> None:
        check_flag(self.id, "published", self.published)
        check_range(self.id, "alpha", self.alpha, 0, float("inf"), above=True)
        check_least(self.id, "every", self.every, 2)
        check_least(self.id, "first", self.first, 2)
        if self.span is not None:
            check_range(self.id, "span", self.span, 1, float("inf"))
        check_choice(self.id, "error", self.error, ("mean", "sum"))
        self._inner: Adaptive | None = None
        if self.on is not None:
            if not isinstance(self.on, str | Mapping):
                raise ConfigurationError(f"{self.id}: on must be a policy's name or configuration, got {self.on!r}")
            inner = get_policy(self.on)
            if not isinstance(inner, Adaptive) or isinstance(inner, LGreCo):
                raise ConfigurationError(
                    f"{self.id}: on must be a policy that chooses a setting of the compressor for each bucket, such as "
                    f"gravac, got {inner.id}"
                )
            self._inner, self.on = inner, inner.get_config()

    def configure(self, settings: UserSettings) -> None:
        super().configure(settings)
        if self._inner is not None:
            # It chooses settings only: with a named collective it measures nothing.
            collective = self._pinned or fitting(self.compressor)[0]
            self._inner.configure(UserSettings(self.compressor, collective, self.feedback))
        self._sums: list[SumSurvey | None] = []
        self._count = 0  # steps since the last adjustment
        self._adjusted = False
        self._tables: list[Table] = []
        self._bases: list[Compressor | None] = []  # by bucket, the compressor whose error is the limit
        self._solved: list[Compressor | None] = []  # these, at the last adjustment
        self._chosen: dict[str, Any] = {}  # settings by layer
        self._instead: dict[str, Any] = {}  # settings of the bases that these replace
        self._plans: list[tuple[Compressor, Compressor, str] | None] = []  # by bucket: base, compressor, reason
        self._reason = ""
        self._surveys: list[SurveyChoice] = []  # of this step, by bucket
        self._surveyed: dict[int, list[SurveyChoice]] = {}  # of steps whose report has not arrived

    def check_compressor(self) -> None:
        compressor = self.compressor
        if compressor.layer_setting is None:
            raise ConfigurationError(
                f"{self.id}: needs a compressor with a ratio, a rank or bits for each layer, which "
                f"{compressor.id} has not; use topk, powersgd, qsgd or uniform, or policy='static'"
            )
        if getattr(compressor, "layers", None):
            raise ConfigurationError(
                f"{self.id}: chooses settings of layers by itself, so {compressor.id} cannot have them; "
                "leave layers out, or use policy='static'"
            )
        rows = getattr(compressor, "rows", None)
        if rows is not None:
            raise ConfigurationError(
                f"{self.id}: measures errors of whole matrices, and rows={rows} cuts them; "
                "leave rows out, or use policy='static'"
            )

    @property
    def by_layer(self) -> bool:
        return True

    @property
    def wants_telemetry(self) -> bool:
        # The survey of a step arrives in a later one
        other = self._inner is not None and self._inner.wants_telemetry
        return super().wants_telemetry or other or bool(self._surveyed)

    def survey(self, bucket: int) -> Survey | None:
        # Only in the steps before an adjustment
        other = None if self._inner is None else self._inner.survey(bucket)
        # The report of the last step before an adjustment comes too late
        is_due = self._period - 1 - _SURVEYED_STEPS <= self._count != self._period - 1
        survey = self._tables[bucket].survey if is_due else None
        whole = self._sums[bucket]
        if survey is not None and whole is not None:
            if self._count == max(0, self._period - 1 - _SURVEYED_STEPS):
                whole.begin()
            whole.last = self._count == self._period - 2
            survey = whole
        self._surveys[bucket] = other, survey
        return SurveyPair(other, survey) if other is not None and survey is not None else other or survey

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        self._tables = [table_for(self.compressor, shape, self._span, self.published) for shape in shapes]
        sums = [None if self.error == "mean" else table.survey for table in self._tables]
        self._sums = [None if survey is None else SumSurvey(survey) for survey in sums]
        self._bases, self._solved = [None] * len(shapes), [None] * len(shapes)
        self._plans = [None] * len(shapes)
        self._surveys = [(None, None)] * len(shapes)
        self._surveyed = {}
        names = {name for table in self._tables for name in table.settings_of(self.compressor)}
        if not names <= self._chosen.keys():
            self._count, self._adjusted = 0, False
        if self._inner is not None:
            yield from self._inner.start(shapes, transport)
        yield from super().start(shapes, transport)

    def levels(self) -> list[Compressor]:
        # A compressor with ranks is predicted to take what it does at the uniform rank
        if self.compressor.layer_setting != "ratio":
            return [self.compressor]
        ratio = self.compressor.get_config()["ratio"]
        return [at_ratio(self.compressor, value) for value in ladder(ratio / self._span, min(1.0, ratio * self._span))]

    def refresh(self, transport: Transport) -> Rounds[None]:
        if self._inner is not None:
            yield from self._inner.refresh(transport)
        yield from super().refresh(transport)
        due = self._count >= self._period
        if due:
            for table in self._tables:
                table.update_errors()
        known = all(table.known for table in self._tables)
        if due and known:
            self._count, self._adjusted = 0, True
            self._solve()
        elif self._adjusted and known and self._bases != self._solved:
            self._solve()

    def choose(self, bucket: int) -> tuple[Compressor | None, str]:
        base, why = (self.compressor, "") if self._inner is None else self._inner.choose(bucket)
        self._bases[bucket] = base
        if base is None:
            return None, why
        plan = self._plans[bucket]
        if plan is None or plan[0] != base:
            table = self._tables[bucket]
            current = table.settings_of(base)
            adjusted = all(self._instead.get(name) == setting for name, setting in current.items()) and bool(current)
            chosen = {name: self._chosen[name] for name in current} if adjusted else current
            reason = self._reason if adjusted else "the same setting for all layers"
            plan = self._plans[bucket] = base, table.compressor(base, chosen), reason
        return plan[1], "; ".join(filter(None, (why, plan[2])))

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        self._count += 1
        if any(survey is not None for pair in self._surveys for survey in pair):
            self._surveyed[step] = list(self._surveys)
        if self._inner is not None:
            self._inner.on_step_end(step, outcomes)

    def on_telemetry(self, report: StepReport) -> None:
        super().on_telemetry(report)
        pairs = self._surveyed.get(report.step, [])
        self._surveyed = {step: pairs for step, pairs in self._surveyed.items() if step > report.step}
        others: dict[int, NDArray[np.float32]] = {}
        for bucket, surveys in report.surveys.items() if pairs else ():
            other, survey = pairs[bucket]
            width = 0 if other is None else other.width(self._shapes[bucket].sizes)
            if other is not None:
                others[bucket] = surveys[:, :width]
            if survey is not None and surveys.shape[1] > width:  # a sum has results in its last step only
                self._tables[bucket].observe(surveys[: 1 if self.published else None, width:])
        if self._inner is not None:
            self._inner.on_telemetry(replace(report, surveys=others))

    def state_dict(self) -> dict[str, Any]:
        return {
            "count": self._count,
            "adjusted": self._adjusted,
            "chosen": dict(self._chosen),
            "instead": dict(self._instead),
            "on": None if self._inner is None else self._inner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        super().load_state_dict(state, cost)
        self._count, self._adjusted = int(state.get("count", 0)), bool(state.get("adjusted", False))
        self._chosen, self._instead = dict(state.get("chosen", {})), dict(state.get("instead", {}))
        self._plans = [None] * len(self._plans)
        self._reason = "as before the restart"
        if self._inner is not None:
            self._inner.load_state_dict(state.get("on") or {}, None)

    @property
    def _period(self) -> int:
        return self.every if self._adjusted else self.first

    @property
    def _span(self) -> float:
        if self.span is not None:
            return self.span
        return _RATIO_SPAN if self.compressor.layer_setting == "ratio" else _SPAN * (1 if self._inner is None else 2)

    def _solve(self) -> None:
        """Choose settings of all layers that are compressed."""
        self._solved = list(self._bases)
        self._plans = [None] * len(self._tables)
        pairs = [(table, base) for table, base in zip(self._tables, self._bases, strict=True) if base is not None]
        settings = [table.settings(base) for table, base in pairs]
        errors, sizes = [], []
        for (table, base), columns in zip(pairs, settings, strict=True):
            errors += table.errors(columns)
            sizes += table.sizes(columns, base)
        columns = [column for of_bucket in settings for column in of_bucket]
        before = [table.settings_of(base) for table, base in pairs]
        values = [value for of_bucket in before for value in of_bucket.values()]
        places = [np.searchsorted(column, value) for column, value in zip(columns, values, strict=True)]
        default = np.array(places, np.int64)
        limit = self.alpha * total(errors, default)
        choice = least_total(errors, sizes, limit, default, strict=self.published)
        found = [column[place].item() for column, place in zip(columns, choice, strict=True)]
        nbytes, uniform = self._nbytes(pairs, found), self._nbytes(pairs, values)
        if not self.published and nbytes > uniform and total(errors, default) <= limit:
            found, nbytes = values, uniform  # a message is not exactly the sum of its layers' sizes
        names = [name for of_bucket in before for name in of_bucket]
        self._chosen, self._instead = dict(zip(names, found, strict=True)), dict(zip(names, values, strict=True))
        share = nbytes / uniform if uniform else 1.0
        self._reason = f"layers at {share:.2f} of the bytes of the same setting for all"

    def _nbytes(self, pairs: Sequence[tuple["Table", Compressor]], values: Sequence[Any]) -> float:
        """Return the bytes of all buckets' messages."""
        nbytes, place = 0.0, 0
        for table, base in pairs:
            layers = len(table.settings_of(base))
            nbytes += table.nbytes(values[place : place + layers], base)
            place += layers
        return nbytes


class Table(ABC):
    """Layers of one bucket that can have different settings; errors are L2 norms of what ranks leave out."""

    survey: Survey | None  # of the bucket; None if no layer can have one

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._taken: list[list[NDArray[np.float64]]] = []
        self._lost: list[NDArray[np.float64]] | None = None  # mean of these, by layer

    @property
    def known(self) -> bool:
        """Whether there are surveys to compute errors from."""
        return self._lost is not None

    def observe(self, surveys: NDArray[np.float32]) -> None:
        """Add the surveys of all ranks; they count after `update_errors`."""
        lost = list(self._lost_in(surveys))
        if all(np.isfinite(errors).all() for errors in lost):
            self._taken.append(lost)

    def update_errors(self) -> None:
        """Compute errors from the surveys that were added since the last call, if any."""
        if self._taken:
            self._lost, self._taken = [np.mean(errors, axis=0) for errors in zip(*self._taken, strict=True)], []

    def compressor(self, base: Any, chosen: Mapping[str, Any]) -> Compressor:
        """Return a compressor for this bucket with these settings, and those of ``base`` for the rest."""
        config = base.get_config()
        layers = {glob.escape(name): value for name, value in chosen.items()} | (config["layers"] or {})
        made = get_compressor(config | {"layers": layers or None})
        return made.bind(self._shape.names, self._shape.sizes, self._shape.shapes)

    @abstractmethod
    def _lost_in(self, surveys: NDArray[np.float32]) -> Iterable[NDArray[np.float64]]:
        """Return the energy that each layer loses at each candidate."""

    @abstractmethod
    def settings_of(self, base: Any) -> dict[str, Any]:
        """Return the settings that a compressor has for the layers, by name."""

    @abstractmethod
    def settings(self, base: Any) -> list[Column]:
        """Return the settings that each layer may have: the candidates and that of ``base``."""

    @abstractmethod
    def errors(self, settings: Sequence[Column]) -> list[NDArray[np.float64]]:
        """Return the error of each layer at these settings."""

    @abstractmethod
    def sizes(self, settings: Sequence[Column], base: Any) -> list[NDArray[np.float64]]:
        """Return the bytes of each layer at these settings, as ``base`` sends it."""

    @abstractmethod
    def nbytes(self, chosen: Sequence[Any], base: Any) -> float:
        """Return the bytes of a whole message with one setting for each layer."""


def table_for(compressor: Compressor, shape: Shape, span: float, whole: bool = False) -> Table:
    """Return the table of a bucket, with candidates from the uniform setting over ``span`` to that times ``span``.

    A compressor whose ``layer_setting`` is ``"ratio"`` has `ratio`, `layers` and `wire_for`, as `mpicomp.TopK` has; one
    of ``"rank"``, `rank`, `rank_of`, `wire`, `min_compression_rate` and, within a bucket, `matrices`, as
    `mpicomp.PowerSGD` has; one of ``"bits"``, `bits`, `bits_of`, `at_bits` and `bucket`, as `mpicomp.QSGD` has. With
    ``whole`` surveys of selections and bits read all elements, and errors of selections are exact.
    """
    if compressor.layer_setting == "rank":
        return _Matrices(compressor, shape, span)
    if compressor.layer_setting == "bits":
        return _Quantized(compressor, shape, span, 1 if whole else _STRIDE)
    return (_WholeSelections if whole else _Selections)(compressor, shape, span)


class _WholeSelections(Table):
    """Ratios, with errors from all elements at the candidates; at other ratios they are interpolated."""

    def __init__(self, compressor: Any, shape: Shape, span: float) -> None:
        super().__init__(shape)
        self._ratios = np.array(ladder(compressor.ratio / span, min(1.0, compressor.ratio * span)))
        ratios = sorted({*self._ratios.tolist(), compressor.ratio})
        self._kept = [np.unique([num_kept(ratio, size) for ratio in ratios]) for size in shape.sizes]
        self._tails = TailSurvey(self._kept)
        self.survey: Survey | None = self._tails

    def _lost_in(self, surveys: NDArray[np.float32]) -> Iterable[NDArray[np.float64]]:
        return self._tails.lost(surveys)

    def settings_of(self, base: Any) -> dict[str, Any]:
        return {name: match_layer_setting(base.layers, name, base.ratio) for name in self._shape.names}

    def settings(self, base: Any) -> list[Column]:
        return [np.sort(np.append(self._ratios, ratio)) for ratio in self.settings_of(base).values()]

    def errors(self, settings: Sequence[Column]) -> list[NDArray[np.float64]]:
        assert self._lost is not None
        parts = zip(self._counts(settings), self._kept, self._lost, strict=True)
        return [np.sqrt(np.interp(counts, known, lost)) for counts, known, lost in parts]

    def sizes(self, settings: Sequence[Column], base: Any) -> list[NDArray[np.float64]]:
        # Bytes per element change little with the count, so those of now are used
        counts = self._counts(settings)
        ratios = self.settings_of(base).values()
        places = [np.searchsorted(column, ratio) for column, ratio in zip(settings, ratios, strict=True)]
        count = int(counts[np.arange(len(places)), places].sum())
        return list(counts * (self._message(count, base) / count))

    def nbytes(self, chosen: Sequence[Any], base: Any) -> float:
        count = sum(num_kept(ratio, size) for ratio, size in zip(chosen, self._shape.sizes, strict=True))
        return self._message(count, base)

    def _counts(self, settings: Sequence[Column]) -> NDArray[np.int64]:
        """Return the elements that layers keep, shape (layers, settings)."""
        pairs = zip(settings, self._shape.sizes, strict=True)
        return np.array([[num_kept(ratio, size) for ratio in column] for column, size in pairs])

    def _message(self, count: int, base: Any) -> float:
        numel = self._shape.numel
        return message_bytes(count, numel, self._shape.dtype, base.wire_for(count, numel))


class _Selections(_WholeSelections):
    """Ratios, with errors from spectra of a sample of the elements."""

    def __init__(self, compressor: Any, shape: Shape, span: float) -> None:
        super().__init__(compressor, shape, span)
        self.survey = SpectrumSurvey(_STRIDE)
        self._mean: Spectra | None = None
        self._count = 0
        self._spectra: Spectra | None = None

    @property
    def known(self) -> bool:
        return self._spectra is not None

    def observe(self, surveys: NDArray[np.float32]) -> None:
        spectra = Spectra(self._shape.sizes, surveys)
        self._count += 1
        self._mean = spectra if self._mean is None else self._mean.mixed(spectra, 1 / self._count)

    def update_errors(self) -> None:
        if self._mean is not None:
            self._spectra, self._mean, self._count = self._mean, None, 0

    def errors(self, settings: Sequence[Column]) -> list[NDArray[np.float64]]:
        assert self._spectra is not None
        ratios = self._counts(settings) / np.array(self._shape.sizes)[:, None]
        return list(np.sqrt(self._spectra.lost(ratios)))


class _Matrices(Table):
    """Ranks of the matrices that are compressed at the uniform rank."""

    def __init__(self, compressor: Any, shape: Shape, span: float) -> None:
        super().__init__(shape)
        found = {matrix.start: matrix for matrix in compressor.bind(shape.names, shape.sizes, shape.shapes).matrices}
        starts = np.cumsum([0, *shape.sizes])[:-1].tolist()
        self._matrices = {name: found[start] for name, start in zip(shape.names, starts, strict=True) if start in found}
        self._ranks: list[tuple[int, int]] = []
        for matrix in self._matrices.values():
            # From this rank on factors are not smaller than the matrix by the compressor's factor, and it is dense.
            dense_rank = matrix.rows * matrix.columns / (matrix.rows + matrix.columns) / compressor.min_compression_rate
            most = min(math.ceil(compressor.rank * span), matrix.rows, matrix.columns, math.ceil(dense_rank) - 1)
            least = min(max(1, math.floor(compressor.rank / span)), most)
            self._ranks.append((least, max(least, most)))
        self._survey = RankSurvey(list(self._matrices.values()), self._ranks)
        self.survey = self._survey if self._matrices else None
        self._lost = None if self._matrices else []

    def _lost_in(self, surveys: NDArray[np.float32]) -> Iterable[NDArray[np.float64]]:
        return self._survey.lost(surveys)

    def settings_of(self, base: Any) -> dict[str, Any]:
        return {name: min(base.rank_of(name), matrix.rows, matrix.columns) for name, matrix in self._matrices.items()}

    def settings(self, base: Any) -> list[Column]:
        # A rank that was not measured is kept
        return [
            np.arange(least, most + 1) if least <= rank <= most else np.array([rank])
            for rank, (least, most) in zip(self.settings_of(base).values(), self._ranks, strict=True)
        ]

    def errors(self, settings: Sequence[Column]) -> list[NDArray[np.float64]]:
        assert self._lost is not None
        return [
            np.sqrt(lost) if column.size == lost.size and column[0] == least else np.zeros(column.size)
            for column, lost, (least, _) in zip(settings, self._lost, self._ranks, strict=True)
        ]

    def sizes(self, settings: Sequence[Column], base: Any) -> list[NDArray[np.float64]]:
        itemsize = self._shape.dtype.itemsize if base.wire is None else 2
        return [
            (matrix.rows + matrix.columns) * itemsize * column.astype(float)
            for column, matrix in zip(settings, self._matrices.values(), strict=True)
        ]

    def nbytes(self, chosen: Sequence[Any], base: Any) -> float:
        return float(sum(size[0] for size in self.sizes([np.array([rank]) for rank in chosen], base)))


_STRETCH = 256  # elements that are measured at a time where a grid is one of a whole array


class _Quantized(Table):
    """Bits of every layer, whatever its size."""

    def __init__(self, compressor: Any, shape: Shape, span: float, stride: int) -> None:
        super().__init__(shape)
        least = max(compressor.least_bits, math.floor(compressor.bits / span))
        numbers = range(least, min(MOST_BITS, math.ceil(compressor.bits * span)) + 1)
        # If residuals shrink at the uniform bits, they have to at all others.
        self._bits = [bits for bits in numbers if compressor.at_bits(bits).contractive or not compressor.contractive]
        self._survey = BitsSurvey(
            [compressor.at_bits(bits) for bits in self._bits], compressor.bucket or _STRETCH, stride
        )
        self.survey = self._survey

    def _lost_in(self, surveys: NDArray[np.float32]) -> Iterable[NDArray[np.float64]]:
        return self._survey.lost(surveys, self._shape.sizes)

    def settings_of(self, base: Any) -> dict[str, Any]:
        return {name: base.bits_of(name) for name in self._shape.names}

    def settings(self, base: Any) -> list[Column]:
        # Bits that were not measured are kept
        return [np.array(self._bits if bits in self._bits else [bits]) for bits in self.settings_of(base).values()]

    def errors(self, settings: Sequence[Column]) -> list[NDArray[np.float64]]:
        assert self._lost is not None
        measured = [column.size == len(self._bits) for column in settings]
        return [
            np.sqrt(lost) if whole else np.zeros(column.size)
            for column, whole, lost in zip(settings, measured, self._lost, strict=True)
        ]

    def sizes(self, settings: Sequence[Column], base: Any) -> list[NDArray[np.float64]]:
        return [
            np.array([float(base.at_bits(int(bits)).packed_bytes(size)) for bits in column])
            for column, size in zip(settings, self._shape.sizes, strict=True)
        ]

    def nbytes(self, chosen: Sequence[Any], base: Any) -> float:
        made: Any = self.compressor(base, dict(zip(self._shape.names, chosen, strict=True)))
        [packer] = packers(made, [self._shape.numel])
        return float(packer.packed_bytes)


class SurveyPair:
    """Two surveys in one."""

    def __init__(self, first: Survey, second: Survey) -> None:
        self._first, self._second = first, second

    def width(self, sizes: Sequence[int]) -> int:
        return self._first.width(sizes) + self._second.width(sizes)

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        surveys = (self._first, self._second)
        return np.concatenate([survey.measure(accumulated, residual, sizes, step) for survey in surveys])


class TailSurvey:
    """Energies that selections of each layer's largest elements leave out, from all elements."""

    def __init__(self, counts: Sequence[NDArray[np.int64]]) -> None:
        self._counts = tuple(counts)  # of elements that each layer keeps, ascending

    def width(self, sizes: Sequence[int]) -> int:
        return sum(counts.size for counts in self._counts)

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        flat = current_device().to_host(accumulated).astype(np.float64)
        parts = []
        for layer, counts in zip(np.split(flat, np.cumsum(sizes)[:-1]), self._counts, strict=True):
            below = np.concatenate(([0.0], np.cumsum(np.sort(np.square(layer)))))  # of the smallest ones
            parts.append(below[layer.size - counts])
        with np.errstate(over="ignore"):
            return np.concatenate(parts).astype(np.float32)

    def lost(self, surveys: NDArray[np.float32]) -> list[NDArray[np.float64]]:
        """Return the energy that all ranks leave out of each layer at each count; surveys: (ranks, width)."""
        return np.split(surveys.astype(np.float64).sum(axis=0), np.cumsum([part.size for part in self._counts])[:-1])


class SumSurvey:
    """A survey of the sum of several steps' accumulated gradients, in the last of these steps.

    Steps that are not finite on this rank are left out. A step that is undone because of another rank stays in it.
    """

    def __init__(self, inner: Survey) -> None:
        self._inner = inner
        self._sum: NDArray[np.floating] | None = None
        self._steps = 0  # in the sum
        self.last = False  # whether the step is the last one

    def begin(self) -> None:
        """Begin a new sum."""
        self._steps = 0

    def width(self, sizes: Sequence[int]) -> int:
        # 0 before the last step
        return self._inner.width(sizes) if self.last else 0

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        if all(to_python(np.isfinite(accumulated).all())):
            if self._sum is None:
                self._sum = accumulated.copy()
            elif self._steps:
                self._sum += accumulated
            else:
                self._sum[:] = accumulated
            self._steps += 1
        if not self.last:
            return np.empty(0, np.float32)
        whole = accumulated if self._sum is None or not self._steps else self._sum
        return self._inner.measure(whole, None, sizes, step)


class RankSurvey:
    """Energies that approximations of a bucket's matrices leave out at several ranks.

    The leading directions come from a subspace iteration that starts at random, the same on all ranks. It leaves out at
    least as much as the best approximation, and at high ranks of slowly falling singular values some percent more.
    """

    def __init__(self, matrices: Sequence[Matrix], ranks: Sequence[tuple[int, int]]) -> None:
        self._matrices = tuple(matrices)
        self._ranks = tuple(ranks)  # the lowest and the highest rank of each matrix; all between are measured

    def width(self, sizes: Sequence[int]) -> int:
        return sum(most - least + 1 for least, most in self._ranks)

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        # NaN for matrices that hold it or infinity
        parts = []
        for matrix, (least, most) in zip(self._matrices, self._ranks, strict=True):
            values = accumulated[matrix.start : matrix.stop].reshape(matrix.rows, matrix.columns)
            parts.append(_lost_at_ranks(values, most)[least - 1 :])
        with np.errstate(over="ignore"):
            return np.concatenate(parts).astype(np.float32)

    def lost(self, surveys: NDArray[np.float32]) -> list[NDArray[np.float64]]:
        """Return the energy that each matrix loses at each rank of its factors; surveys: (ranks, width)."""
        cuts = np.cumsum([most - least + 1 for least, most in self._ranks])[:-1]
        return np.split(surveys.astype(np.float64).sum(axis=0), cuts)


class BitsSurvey:
    """Energies that a quantizer leaves out of each layer at several bits."""

    def __init__(self, quantisers: Sequence[Quantiser], bucket: int, stride: int = 1) -> None:
        self._quantisers = tuple(quantisers)  # one for each number of bits
        self._bucket = bucket  # their length of a bucket
        self._stride = stride  # every n-th bucket of a large layer is measured, other ones at every step
        self._workspaces: dict[Device, Workspace] = {}

    def width(self, sizes: Sequence[int]) -> int:
        return len(sizes) * len(self._quantisers)

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        # NaN or infinity for layers that hold it
        out = np.zeros((len(sizes), len(self._quantisers)))
        workspace = self._workspaces.setdefault(current_device(), Workspace(current_device()))
        for row, start, size in zip(out, np.cumsum([0, *sizes]), sizes, strict=False):
            sample = self._sample(accumulated[start : start + size], workspace, step)
            sent = workspace.array("sent", sample.size, sample.dtype)
            for place, quantiser in enumerate(self._quantisers):
                message = workspace.array("message", quantiser.packed_bytes(sample.size), np.dtype(np.uint8))
                row[place] = quantiser.pack(sample, message, sent, step)
            row *= size / max(1, sample.size)
        with np.errstate(over="ignore"):
            return out.reshape(-1).astype(np.float32)

    def _sample(self, layer: NDArray[np.floating], workspace: Workspace, step: int) -> NDArray[np.floating]:
        if layer.size < WHOLE * self._stride:
            return layer
        buckets = layer.size // (self._bucket * self._stride)
        rows = layer[: buckets * self._bucket * self._stride].reshape(buckets, self._stride, self._bucket)
        sample = workspace.array("sample", buckets * self._bucket, layer.dtype)
        sample.reshape(buckets, self._bucket)[:] = rows[:, step % self._stride]
        return sample

    def lost(self, surveys: NDArray[np.float32], sizes: Sequence[int]) -> NDArray[np.float64]:
        """Return the energy that all ranks lose, shape (layers, quantizers); surveys: (ranks, width)."""
        lost: NDArray[np.float64] = surveys.astype(np.float64).sum(axis=0).reshape(len(sizes), -1)
        return lost


def _lost_at_ranks(matrix: NDArray[np.floating], most: int) -> NDArray[np.float64]:
    """Return the energy outside the leading directions of a matrix, from 1 to ``most`` of them."""
    device = current_device()
    [energy] = to_python(kernels.energy(matrix.reshape(-1)))
    if not np.isfinite(energy):
        return np.full(most, np.nan)
    directions = min(*matrix.shape, most + _EXTRA_DIRECTIONS)
    right = device.to_device(
        np.random.default_rng(0).standard_normal((matrix.shape[1], directions)).astype(matrix.dtype)
    )
    for _ in range(_ITERATIONS):
        with np.errstate(over="ignore", invalid="ignore"):
            right = matrix.T @ orthogonalize(matrix @ orthogonalize(right))
        if not all(to_python(np.isfinite(right).all())):  # products of the largest numbers overflow
            return np.full(most, np.nan)
    squares = np.linalg.svd(device.to_host(right).astype(np.float64), compute_uv=False) ** 2
    left: NDArray[np.float64] = np.maximum(energy - np.cumsum(squares[:most]), 0.0)
    return left
