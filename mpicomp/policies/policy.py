"""The base class of policies, which choose the plan of each bucket in a step."""

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp.collectives import Scheme
from mpicomp.compressors import Compressor
from mpicomp.cost import CostModel, Prediction
from mpicomp.errors import ConfigurationError, UnknownNameError
from mpicomp.gpu import HOST, Device
from mpicomp.mpi.rounds import Rounds
from mpicomp.mpi.transport import Transport
from mpicomp.policies.surveys import Survey
from mpicomp.registry import Configurable, Registry

MAX_REPORT_STEPS = 4
"""Steps after which a report arrives at the latest: policies follow changes within ten."""

_SETTINGS_OF_ALL = ("warmup", "cost")  # of a configuration, whatever the policy


@dataclass(frozen=True)
class Plan:
    """A scheme for one bucket in one step.

    Parameters
    ----------
    scheme : Scheme
        A compressor bound to a collective.
    reason : str
        Reason for the choice, for the record.
    prediction : Prediction or None
        Predicted seconds, or None before any are known.
    settled : bool
        Whether the plan ran in some steps before: seconds measured earlier include allocation.
    row : int
        Its number among the bucket's candidates, for the policy that chose it.
    """

    scheme: Scheme[Any]
    reason: str
    prediction: Prediction | None = None
    settled: bool = True
    row: int = 0


@dataclass(frozen=True)
class Shape:
    """A bucket: names, lengths and shapes of its parameters, the dtype of the exchange, and its device.

    Ranks may differ in the device, which is not compared.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]
    device: Device = field(default=HOST, compare=False)

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return sum(self.sizes)


@dataclass(frozen=True)
class UserSettings:
    """Settings of the user that a policy has to respect.

    Parameters
    ----------
    compressor : Compressor or None
        The compressor; None leaves it to the policy.
    collective : str
        Name of a collective, or ``"auto"``.
    feedback : bool or None
        Whether there are residuals; None follows the compressor.
    cost : CostModel, str or None
        See `mpicomp.Reducer`.
    normalises : bool
        See `mpicomp.Reducer`.
    """

    compressor: Compressor | None = None
    collective: str = "auto"
    feedback: bool | None = None
    cost: CostModel | str | None = None
    normalises: bool = True

    @property
    def pinned(self) -> str | None:
        """The collective that the user named; None for ``"auto"``."""
        return None if self.collective == "auto" else self.collective


class BucketOutcome(NamedTuple):
    """Energy, gain and kept elements of an exchange, the same on all ranks; see `mpicomp.collectives.Result`."""

    energy: float
    gain: float
    kept: float


@dataclass(frozen=True)
class StepReport:
    """Telemetry of a step from all ranks, the same on all of them; it arrives a step later or more.

    A report that is predicted to travel for longer than a step arrives up to `MAX_REPORT_STEPS` later, in order.

    Parameters
    ----------
    step : int
        Number of the step.
    lr : float or None
        The learning rate on rank 0.
    plans, outcomes : sequence of Plan, of BucketOutcome
        The plan that each bucket ran, and its outcome.
    times : array of float64, shape (ranks, buckets, 4)
        Start and end of each bucket's exchange on the clock that ranks share, the kernel seconds in it, and when its
        gradients were ready.
    surveys : mapping of int to array of float32, shape (ranks, width)
        By bucket, the surveys of all ranks, if the policy requested them.
    """

    step: int
    lr: float | None
    plans: Sequence[Plan]
    outcomes: Sequence[BucketOutcome]
    times: NDArray[np.float64]
    surveys: Mapping[int, NDArray[np.float32]]

    @functools.cached_property
    def latest(self) -> NDArray[np.float64]:
        """Maximum of `times` over ranks, shape (buckets, 4)."""
        latest: NDArray[np.float64] = self.times.max(axis=0)
        return latest


@dataclass(eq=False)
class Policy(metaclass=Configurable):
    """Chooses plans, the same on all ranks. Its fields are its settings; one object serves one reducer.

    To add a policy, derive a dataclass that defines `id`, `configure`, `plan` and others as needed, and register it
    with `mpicomp.register`. It may decide only by the arguments of these methods, which are the same on all ranks.
    """

    kind: ClassVar[str] = "policy"
    id: ClassVar[str]
    """The name in the registry."""
    paper: ClassVar[str] = "none"
    """The paper that the policy comes from, and the deviations from it."""
    resumes: ClassVar[bool] = True
    """Whether plans are the same after a checkpoint as without one; not if gradients are surveyed again first."""

    def __post_init__(self) -> None:
        self.compressor: Compressor
        """The compressor whose settings are chosen; set by `configure`."""
        self.feedback = True
        """Whether there are residuals."""
        self.warmup: int | str | None = None
        """The warm-up before it, see `mpicomp.policies.schedule.read_warmup`; None for the default."""
        self.known_cost: CostModel | str | None = None
        """The cost model, or its file; None lets it be measured."""
        self.bucket_bytes: int | None = None
        """Length at which arrays are cut into buckets, if the policy needs a fixed one; set by `configure`."""
        self.serves = False
        """Whether a reducer uses it."""
        self.check()

    def check(self) -> None:
        """Raise `ConfigurationError` for a wrong setting."""

    @abstractmethod
    def configure(self, settings: UserSettings) -> None:
        """Apply the settings of the user; set `compressor` and `feedback`.

        Raises
        ------
        ConfigurationError
            For settings that this policy cannot use.
        """

    @property
    def cost(self) -> CostModel | None:
        """The cost model that predicts seconds; None before the first step, or if the policy predicts none."""
        return None

    @property
    def wants_telemetry(self) -> bool:
        """Whether ranks are to share the telemetry of this step; see `on_telemetry`."""
        return False

    def survey(self, bucket: int) -> Survey | None:
        """Return the survey of a bucket for this step, or None; `on_telemetry` gets its results."""
        return None

    def bucket_limit(self, nbytes: int, transport: Transport) -> Rounds[int | None]:
        """Return the length at which arrays of ``nbytes`` in all are cut into buckets, the same on all ranks.

        None if the policy predicts no seconds. Collective over all ranks, as rounds.
        """
        return None
        yield

    def start(self, shapes: Sequence[Shape], transport: Transport) -> Rounds[None]:
        """Prepare new buckets. Collective over all ranks, as rounds."""
        return
        yield

    def repeats(self) -> bool:
        """Begin a step; return whether it runs the last plans and the policy learns nothing from it, on all ranks.

        Then `refresh`, `plan` and `survey` are not called in this step, and `on_step_end` gets no outcomes.
        """
        return False

    def refresh(self, transport: Transport) -> Rounds[None] | tuple[()]:
        """Prepare this step's plans. Collective, as rounds, or an empty tuple in place of a generator without any."""
        return ()

    @abstractmethod
    def plan(self, bucket: int) -> Plan:
        """Return a bucket's plan for this step; called once a step."""

    def on_step_end(self, step: int, outcomes: Sequence[BucketOutcome]) -> None:
        """Learn from the outcomes of a step, at its end; not called for a step that was undone."""

    def on_telemetry(self, report: StepReport) -> None:
        """Learn from the telemetry of a step with `wants_telemetry` or a survey, some steps later."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that has to survive a restart, JSON-able; not the cost model."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], cost: CostModel | None) -> None:
        """Restore the state that `state_dict` returned, and a cost model if there is one. Not collective."""

    def get_config(self) -> dict[str, Any]:
        """Return a JSON-able configuration from which `mpicomp.policies.get_policy` builds an equal policy."""
        return {"id": self.id} | {field.name: getattr(self, field.name) for field in fields(self) if field.init}

    @classmethod
    def from_config(cls, settings: Mapping[str, Any]) -> Self:
        """Build a policy from its settings; raise for unknown ones."""
        known = [field.name for field in fields(cls) if field.init]
        chosen = {name: value for name, value in settings.items() if name not in _SETTINGS_OF_ALL}
        for name in chosen:
            if name not in known:
                raise UnknownNameError(f"{cls.id} setting", name, [*known, *_SETTINGS_OF_ALL])
        policy = cls(**chosen)
        policy.warmup, policy.known_cost = settings.get("warmup"), settings.get("cost")
        return policy


def model_of(shapes: Sequence[Shape]) -> dict[str, int]:
    """Return names and sizes of all parameters, as `Compressor.bind` takes them."""
    return {name: size for shape in shapes for name, size in zip(shape.names, shape.sizes, strict=True)}


def feedback_of(compressor: Compressor, feedback: bool | None) -> bool:
    """Return whether there are residuals; raise if the compressor needs the opposite."""
    chosen = compressor.feedback if feedback is None else feedback
    if chosen and not compressor.contractive:
        form = compressor.contractive_variant
        raise ConfigurationError(
            f"{compressor.id}: {compressor!r} is not contractive, so its residual would grow from step to step; "
            "leave feedback out" + (f", or use {form!r}" if form is not None else "")
        )
    if not chosen and compressor.entry.momentum:
        raise ConfigurationError(
            f"{compressor.id}: momentum correction keeps the elements that were not sent, which needs error feedback; "
            "leave feedback out, or set momentum=0"
        )
    return chosen


POLICIES: Registry[Policy] = Registry("policy", ["mpicomp.policies", "mpicomp.systems"])
