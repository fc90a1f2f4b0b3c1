"""The policy `LGreCo`: when gradients are surveyed, and which setting each layer gets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import fitting
from mpicomp.compressors import Compressor
from mpicomp.cost import CostModel
from mpicomp.errors import ConfigurationError
from mpicomp.mpi.rounds import Rounds
from mpicomp.mpi.transport import Transport
from mpicomp.policies import get_policy
from mpicomp.policies.measured_policy import Adaptive
from mpicomp.policies.plan_tradeoff import least_total, total
from mpicomp.policies.policy import BucketOutcome, Shape, StepReport, UserSettings
from mpicomp.policies.ratio_levels import at_ratio, ladder
from mpicomp.policies.surveys import Survey
from mpicomp.registry import register
from mpicomp.setting_checks import check_flag, check_least, check_range
from mpicomp.systems.lgreco.layer_settings import SumSurvey, Table, table_for

_SURVEYED_STEPS = 10  # before an adjustment
_RATIO_SPAN = 8.0  # factor from the uniform ratio to the smallest and the largest candidate
_SETTING_SPAN = 2.0  # the same for ranks and bits


class SurveyPair:
    """The surveys of the inner policy and of this one, at least one of which is there."""

    def __init__(self, inner: Survey | None, outer: Survey | None) -> None:
        self.inner, self._outer = inner, outer
        self.inner_size = 0
        """Length of the inner survey's result; known once it was measured, and the same on all ranks."""

    def measure(
        self, accumulated: NDArray[np.floating], residual: NDArray[np.floating] | None, sizes: Sequence[int], step: int
    ) -> NDArray[np.float32]:
        none = np.empty(0, np.float32)
        inner = none if self.inner is None else self.inner.measure(accumulated, residual, sizes, step)
        self.inner_size = inner.size
        outer = none if self._outer is None else self._outer.measure(accumulated, residual, sizes, step)
        return np.concatenate([inner, outer])


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
    published : bool
        Set by `as_published`: errors of the sum of ten accumulated gradients of rank 0, which takes an array as long as
        the gradient, and the paper's program.
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
    published: bool = field(default=False, kw_only=True)

    @classmethod
    def as_published(cls, **settings: Any) -> Self:
        """Return the paper's L-GreCo, as for its Transformer-XL, but for ``settings``."""
        return cls.from_config({"published": True, "first": 1000, "every": 1000} | settings)

    def check(self) -> None:
        check_flag(self.id, "published", self.published)
        check_range(self.id, "alpha", self.alpha, 0, float("inf"), above=True)
        check_least(self.id, "every", self.every, 2)
        check_least(self.id, "first", self.first, 2)
        if self.span is not None:
            check_range(self.id, "span", self.span, 1, float("inf"))
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
        self._count = 0  # steps since the last adjustment
        self._adjusted = False
        self._tables: list[Table] = []
        self._solved: list[Compressor | None] = []  # by bucket, the base at the last adjustment
        self._chosen: dict[str, Any] = {}  # settings by layer
        self._instead: dict[str, Any] = {}  # settings of the bases that these replace
        self._reason = ""
        self._surveys: list[SurveyPair | None] = []  # of this step, by bucket
        self._surveyed: dict[int, list[SurveyPair | None]] = {}  # of steps whose report has not arrived

    def check_compressor(self) -> None:
        compressor, self.by_layer = self.compressor, True
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
        if isinstance(survey, SumSurvey):
            if self._count == max(0, self._period - 1 - _SURVEYED_STEPS):
                survey.begin()
            survey.last = self._count == self._period - 2
        pair = None if other is None and survey is None else SurveyPair(other, survey)
        self._surveys[bucket] = pair
        return pair

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        self._tables = [table_for(self.compressor, shape, self._span, self.published) for shape in shapes]
        for table in self._tables:
            if self.published and table.survey is not None:
                table.survey = SumSurvey(table.survey)
        self._solved = [None] * len(shapes)
        self._surveys = [None] * len(shapes)
        self._surveyed = {}
        names = {name for table in self._tables for name in table.settings_of(self.compressor)}
        if not names <= self._chosen.keys():
            self._count, self._adjusted = 0, False
        if self._inner is not None:
            yield from self._inner.start(shapes, transport)
        yield from super().start(shapes, transport)

    def levels(self) -> list[Compressor]:
        # A compressor with ranks is predicted to take as long as at the uniform rank
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
        elif self._adjusted and known and [table.base for table in self._tables] != self._solved:
            self._solve()

    def choose(self, bucket: int) -> tuple[Compressor | None, str]:
        base, why = (self.compressor, "") if self._inner is None else self._inner.choose(bucket)
        table = self._tables[bucket]
        table.base = base
        if base is None:
            return None, why
        plan = table.plan
        if plan is None or plan[0] != base:
            current = table.settings_of(base)
            adjusted = all(self._instead.get(name) == setting for name, setting in current.items()) and bool(current)
            chosen = {name: self._chosen[name] for name in current} if adjusted else current
            reason = self._reason if adjusted else "the same setting for all layers"
            plan = table.plan = base, table.compressor(base, chosen), reason
        return plan[1], "; ".join(filter(None, (why, plan[2])))

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        self._count += 1
        if any(pair is not None for pair in self._surveys):
            self._surveyed[step] = list(self._surveys)
        if self._inner is not None:
            self._inner.on_step_end(step, outcomes)

    def on_telemetry(self, report: StepReport) -> None:
        super().on_telemetry(report)
        pairs = self._surveyed.get(report.step, [])
        self._surveyed = {step: pairs for step, pairs in self._surveyed.items() if step > report.step}
        others: dict[int, NDArray[np.float32]] = {}
        for bucket, surveys in report.surveys.items() if pairs else ():
            pair = pairs[bucket]
            assert pair is not None
            width = pair.inner_size
            if pair.inner is not None:
                others[bucket] = surveys[:, :width]
            if surveys.shape[1] > width:  # a sum has results in its last step only
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
        for table in self._tables:
            table.plan = None
        self._reason = "as before the restart"
        if self._inner is not None:
            self._inner.load_state_dict(state.get("on") or {}, None)

    @property
    def _period(self) -> int:
        return self.every if self._adjusted else self.first

    @property
    def _span(self) -> float:
        default = _SETTING_SPAN if self._inner is None else 2 * _SETTING_SPAN
        return self.span or (_RATIO_SPAN if self.compressor.layer_setting == "ratio" else default)

    def _solve(self) -> None:
        self._solved = [table.base for table in self._tables]
        uniform: dict[str, Any] = {}
        columns, errors, sizes = [], [], []
        compressed = [(table, table.base) for table in self._tables if table.base is not None]
        for table in self._tables:
            table.plan = None
        for table, base in compressed:
            uniform |= table.settings_of(base)
            settings = table.settings(base)
            columns += settings
            errors += table.errors(settings)
            sizes += table.sizes(settings, base)
        pairs = zip(columns, uniform.values(), strict=True)
        default = np.array([np.searchsorted(column, setting) for column, setting in pairs], np.int64)
        limit = self.alpha * total(errors, default)
        choice = least_total(errors, sizes, limit, default, strict=self.published)
        found = [column[place].item() for column, place in zip(columns, choice, strict=True)]
        chosen = dict(zip(uniform, found, strict=True))
        nbytes, uniform_bytes = (
            sum(table.nbytes([settings[name] for name in table.settings_of(base)], base) for table, base in compressed)
            for settings in (chosen, uniform)
        )
        if not self.published and nbytes > uniform_bytes and total(errors, default) <= limit:
            chosen, nbytes = uniform, uniform_bytes  # a message is not exactly the sum of its layers' sizes
        self._chosen, self._instead = chosen, uniform
        share = nbytes / uniform_bytes if uniform_bytes else 1.0
        self._reason = f"layers at {share:.2f} of the bytes of the same setting for all"
