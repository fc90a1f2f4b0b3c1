"""What every compressor is: a frozen set of parameters with a name, that turns an array into a message."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors.accumulated import Accumulated
from mpicomp.compressors.old_hooks import OldHooks
from mpicomp.compressors.wire import INDICES, VALUES, Wire, compact
from mpicomp.errors import ConfigurationError, UnknownNameError
from mpicomp.kernels import cpu
from mpicomp.rounds import Group
from mpicomp.workspace import Workspace

_BOUND = "bound"


@dataclass
class Context:
    """What a compressor and a scheme know beside the array.

    Parameters
    ----------
    group : Group
        Who takes part. Random choices that must differ between ranks come from this rank's place in it.
    step, bucket, seed : int
        Which exchange it is. The same on all ranks; random choices come from them.
    memory : dict
        This bucket's memory from step to step. Numbers and strings in it are part of a checkpoint.
    workspace : Workspace
        Where arrays that are needed at every step come from.
    """

    group: Group = field(default_factory=lambda: Group(0, 1))
    step: int = 0
    bucket: int = 0
    seed: int = 0
    memory: dict[str, Any] = field(default_factory=dict)
    workspace: Workspace = field(default_factory=Workspace)

    @property
    def rank(self) -> int:
        """The place of this rank in the group."""
        return self.group.rank

    def random(self, shared: bool) -> np.random.Generator:
        """Return this step's and bucket's random numbers, the same on all ranks (``shared``) or different on each."""
        own = () if shared else (self.rank,)
        return np.random.default_rng([self.seed, self.step, self.bucket, *own])

    def key(self, shared: bool, part: int = 0) -> int:
        """Return 64 bits for a kernel that draws random numbers by itself.

        Parameters
        ----------
        shared : bool
            Whether all ranks get the same.
        part : int
            Tells draws of one step apart.
        """
        own = () if shared else (self.rank,)
        entropy = [self.seed, self.step, self.bucket, part, *own]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


@dataclass(frozen=True)
class Entry:
    """What happens to a gradient before it is added to the residual.

    Parameters
    ----------
    clip : float or None
        Each rank scales its gradients down to an L2 norm of at most ``clip / sqrt(ranks)``, over all its arrays.
    momentum : float
        Where it is not 0, what enters is the velocity ``u = momentum * u + gradient``.
    nesterov : bool
        ``u = momentum * (u + gradient)`` and what enters is ``u + gradient``.
    masking : bool
        Whether the velocity of what was sent is set to zero.
    """

    clip: float | None = None
    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = True


@dataclass(frozen=True, repr=False)
class Compressor(OldHooks, ABC):
    """A frozen dataclass whose fields are its parameters, each with a default.

    Two compressors are equal when their configurations are. State that lives from step to step is not kept here
    but in the memory of the bucket that is compressed, so one object can serve many buckets.
    """

    kind: ClassVar[str] = "compressor"
    id: ClassVar[str]
    """The name in the registry."""
    family: ClassVar[str]
    """``"dense"``, ``"sparsifier"``, ``"quantiser"`` ..."""
    message: ClassVar[str]
    """What travels: ``"dense"`` (an array that ranks can sum), ``"shared"`` (a short one), ``"sparse"`` (indices and
    values), ``"packed"`` (all elements, in few bits), ``"integers"`` (the same, on a grid that ranks share, so that
    they can be summed), ``"votes"`` (signs, of which the majority counts), ``"factors"``, ``"sketch"`` or ``"code"``
    (one that was learned).
    """
    paper: ClassVar[str]
    """Where it comes from, and what is done differently."""
    layer_setting: ClassVar[str | None] = None
    """Which parameter its ``layers`` has values of for parts of a model, by the names of their parameters: ``"ratio"``
    of a selection, ``"rank"`` of factors (see `mpicomp.policies.tables.table_for`); None where it has no ``layers``.
    """
    learns: ClassVar[bool] = False
    """Whether it sends a code that the run has to learn first; then it is a `Learner`."""

    def __repr__(self) -> str:
        """Name the parameters that are not at their defaults."""
        values = {entry.name: (getattr(self, entry.name), entry.default) for entry in _parameters(self)}
        shown = [f"{name}={value!r}" for name, (value, default) in values.items() if value != default]
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    @abstractmethod
    def feedback(self) -> bool:
        """Whether it runs with error feedback when nothing else is said."""

    @property
    def contractive(self) -> bool:
        """Whether what it keeps back shrinks from step to step under error feedback; if not, feedback is refused."""
        return True

    @property
    def contracting(self) -> "Compressor | None":
        """Itself where it contracts; otherwise a form of it that does, None where there is none."""
        return self if self.contractive else None

    @property
    def unbiased(self) -> bool:
        """Whether what is sent is right on the average of its random choices."""
        return False

    @property
    def replaceable(self) -> bool:
        """Whether a dense step may take its place now and then.

        Not where it delivers something else than a mean of gradients, nor where it learns from what it exchanges.
        """
        return True

    @property
    def selects_by_ratio(self) -> bool:
        """Whether it selects elements, as many as its parameter ``ratio`` says, which policies may then choose."""
        return self.message in ("sparse", "shared") and any(entry.name == "ratio" for entry in fields(self))

    @property
    def by_magnitude(self) -> bool:
        """Whether it selects the largest elements, or nearly these; if not, any may be among them."""
        return True

    @property
    def needs(self) -> tuple[str, ...]:
        """Packages without which it cannot run, beside those that mpicomp itself needs."""
        return ()

    @classmethod
    def suggested(cls) -> "Sequence[Compressor]":
        """Return the settings among which ``policy="auto"`` chooses where no compressor is named: mostly none.

        They select the largest elements by a ratio, which is theirs to choose, or pack all, or learn a code.
        """
        return ()

    @property
    def entry(self) -> Entry:
        """What happens to gradients before they are added to the residual: nothing, if not said otherwise."""
        return Entry()

    def bind(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        shapes: Sequence[tuple[int, ...]] = (),
        *,
        model: Mapping[str, int] | None = None,
        warm_up: bool = True,
    ) -> "Compressor":
        """Return the compressor for a bucket of these parameters: itself, unless they matter to it.

        What it learns about them goes into fields made by `bound`, so that binding it again is allowed.

        Parameters
        ----------
        names, sizes : sequence of str, of int
            The bucket's parameters, in order.
        shapes : sequence of tuple of int
            Their shapes; where they are left out each has one dimension.
        model : mapping of str to int, optional
            Names and sizes of all parameters of the model, the bucket's among them; the bucket where left out.
        warm_up : bool
            If not, the compressor does at once what it otherwise does after its first steps.
        """
        return self

    def expected(self, numel: int) -> int:
        """Return the number of elements of ``numel`` that are to be expected to be sent, for costs and for room."""
        return numel

    @abstractmethod
    def wire_bytes_per_element(self, itemsize: int) -> float:
        """Bytes of message for one element of the array that is compressed, on the average, headers left out."""

    def get_config(self) -> dict[str, Any]:
        """Return a JSON-able configuration that `mpicomp.get_compressor` turns into an equal compressor."""
        return {"id": self.id} | {field.name: getattr(self, field.name) for field in _parameters(self)}

    @classmethod
    def from_config(cls, parameters: Mapping[str, Any]) -> Self:
        """Build one from its parameters, refusing those that it does not have."""
        known = [field.name for field in _parameters(cls)]
        for name in parameters:
            if name not in known:
                if not known:
                    raise ConfigurationError(f"{cls.id}: has no parameters, got '{name}'")
                raise UnknownNameError(f"{cls.id} parameter", name, known)
        return cls(**parameters)


def _parameters(compressor: Compressor | type[Compressor]) -> list[Field[Any]]:
    """Return a compressor's parameters: its own first, then those that many have."""
    parameters = [entry for entry in fields(compressor) if _BOUND not in entry.metadata]
    return sorted(parameters, key=lambda entry: bool(entry.kw_only))


def bound(default: Any) -> Any:
    """Make a field for what `Compressor.bind` finds out about a bucket: it is no parameter, and in no configuration."""
    return field(default=default, kw_only=True, metadata={_BOUND: True})


@dataclass
class Selection:
    """Elements of an array: ``indices`` ascending without repetition, and the array's ``values`` there."""

    indices: NDArray[np.uint32]
    values: NDArray[np.floating]


@dataclass(frozen=True, repr=False)
class Sparsifier(Compressor):
    """A compressor that sends some elements as they are and keeps the others back.

    To add one: derive from it, give `select` and, where the number of selected elements depends on the
    array's length alone, `count`; register it with `mpicomp.register`.

    Parameters
    ----------
    wire : {None, "fp16", "bf16", "signs"}
        How values travel. The 16-bit forms are rounded at the sender, and the error stays in the residual. So does that
        of ``"signs"``: a bit a value and one mean magnitude for a whole message, which only those collectives carry
        that deliver messages as they are.
    indices : {"auto", "plain", "elias-fano"}
        How indices travel: as 32-bit integers, in a code near their entropy, or in what `mpicomp.compressors.message`
        finds worth it for their number.
    """

    family: ClassVar[str] = "sparsifier"
    message: ClassVar[str] = "sparse"

    wire: str | None = field(default=None, kw_only=True)
    indices: str = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        check_choice(self.id, "wire", self.wire, VALUES)
        check_choice(self.id, "indices", self.indices, ("auto", *INDICES))

    @property
    def feedback(self) -> bool:
        """Sparsifiers that pick by magnitude are biased: what is not sent has to be kept."""
        return True

    def count(self, numel: int) -> int | None:
        """Return the number of elements selected out of ``numel``; None where the values decide it."""
        return None

    def expected(self, numel: int) -> int:
        """See `Compressor.expected`."""
        return self.count(numel) or kept(getattr(self, "ratio", 0.01), numel)

    def wire_for(self, count: int, numel: int) -> Wire:
        """Return how ``count`` elements of ``numel`` travel; the same on all ranks, since only shapes decide."""
        return Wire(self.wire, compact(count, numel) if self.indices == "auto" else self.indices)

    def wire_bytes_per_element(self, itemsize: int) -> float:
        """Return index and value for the kept fraction, in a bucket of 2**20 elements."""
        numel = 1 << 20
        count = self.expected(numel)
        coded = self.wire_for(count, numel).indices != "plain"
        indices = cpu.index_bytes(count, numel) if coded else 4 * count
        value = {None: itemsize, "signs": 1 / 8}.get(self.wire, 2)
        return (indices + count * value) / numel

    @abstractmethod
    def select(self, accumulated: Accumulated, context: Context) -> Selection:
        """Choose what is sent.

        Parameters
        ----------
        accumulated : Accumulated
            Gradient plus residual; ``accumulated.array()`` is the plain array. Not empty.
        context : Context
            Step, seed, this bucket's memory, and a workspace for arrays that are needed at every step.

        Returns
        -------
        Selection
            Valid until the next call for the same bucket.
        """


@dataclass(frozen=True, repr=False)
class SharedSparsifier(Compressor):
    """A compressor that sends the same elements on all ranks, so that no index travels and values can be summed.

    To add one: derive from it and give `count` and `positions`. Every collective that sums dense arrays carries it.

    Parameters
    ----------
    wire : {None, "fp16", "bf16"}
        How values travel; the 16-bit forms are summed in at least float32, as those of `mpicomp.Dense` are.
    """

    family: ClassVar[str] = "sparsifier"
    message: ClassVar[str] = "shared"

    wire: str | None = field(default=None, kw_only=True)

    @property
    def by_magnitude(self) -> bool:
        """Positions that all ranks share follow from no rank's values."""
        return False

    def __post_init__(self) -> None:
        check_choice(self.id, "wire", self.wire, (None, "fp16", "bf16"))

    @property
    def feedback(self) -> bool:
        """What is not sent has to be kept."""
        return True

    def wire_bytes_per_element(self, itemsize: int) -> float:
        """Return the value for the kept fraction."""
        return self.count(1 << 20) / (1 << 20) * (itemsize if self.wire is None else 2)

    @abstractmethod
    def count(self, numel: int) -> int:
        """Return the number of elements sent out of ``numel``."""

    def expected(self, numel: int) -> int:
        """See `Compressor.expected`."""
        return self.count(numel)

    @abstractmethod
    def positions(self, numel: int, context: Context, out: NDArray[np.uint32]) -> None:
        """Write ``count(numel)`` positions, ascending without repetition, the same on all ranks.

        They may depend on the seed, the step and the bucket; ``context.random(shared=True)`` does.
        """

    def weights(self, numel: int) -> NDArray[np.floating] | float:
        """Return what values are multiplied by before they are sent; the receiver adds them as they are."""
        return 1.0

    @property
    def values(self) -> Compressor | None:
        """What values travel by, one that takes the array's place; None: as a dense array, see ``wire``."""
        return None


@dataclass(frozen=True, repr=False)
class Quantiser(Compressor):
    """A compressor that sends every element, in few bits.

    To add one: derive from it and give `packed_bytes`, `pack`, `unpack` and `unpack_add`. What is packed depends on the
    array alone, and its length on the array's.
    """

    family: ClassVar[str] = "quantiser"
    message: ClassVar[str] = "packed"

    @property
    def feedback(self) -> bool:
        """What rounding takes has to be kept."""
        return True

    def wire_bytes_per_element(self, itemsize: int) -> float:
        """Return the bytes of an element in a bucket of 2**20."""
        return self.packed_bytes(1 << 20) / (1 << 20)

    @abstractmethod
    def packed_bytes(self, numel: int) -> int:
        """Return the number of bytes that ``numel`` elements are packed into: a multiple of 8; 0 for none."""

    @abstractmethod
    def pack(
        self, array: NDArray[np.floating], message: NDArray[np.uint8], sent: NDArray[np.floating], key: int
    ) -> float:
        """Pack an array.

        Parameters
        ----------
        array : array, shape (n,)
            float32 or float64; it may be empty. Not to be written to.
        message : array of uint8, shape (packed_bytes(n),)
            Receives what travels; aligned to 8 bytes. All of it is written to.
        sent : array, shape (n,)
            Receives what `unpack` makes of the message, bit for bit. Where an element of ``array`` is NaN or infinite,
            some of it is.
        key : int
            64 bits, others for each call: all random choices come from them.

        Returns
        -------
        float
            Squared L2 norm of ``array - sent``; NaN or infinite where an element is.
        """

    @abstractmethod
    def unpack(self, message: NDArray[np.uint8], out: NDArray[np.floating]) -> None:
        """Write what was packed to an array of the same length and dtype."""

    @abstractmethod
    def unpack_add(self, message: NDArray[np.uint8], factor: float, out: NDArray[np.floating]) -> None:
        """Add ``factor`` times what was packed to an array of the same length and dtype."""


@dataclass(frozen=True, repr=False)
class SharedQuantiser(Compressor):
    """A compressor that rounds every element to a grid that all ranks share, so that integers are summed.

    Grids are symmetric and reach as far as any rank asks for. To add one: derive from it and give `scales`,
    `stochastic` and `reach`.
    """

    family: ClassVar[str] = "quantiser"
    message: ClassVar[str] = "integers"

    @property
    @abstractmethod
    def scales(self) -> tuple[int, ...]:
        """Integers at the end of each grid, ascending, of which the first is below 2**24.

        An element travels on the finest grid on which no rank's integer is beyond ``scales[0]``.
        """

    @property
    @abstractmethod
    def stochastic(self) -> bool:
        """Whether elements are rounded at random, so that they are right on the average; if not, to the nearest."""

    @abstractmethod
    def reach(self, array: NDArray[np.floating]) -> float:
        """Return how far from zero this rank wants grids to reach; NaN or infinite where an element is.

        The array may be empty. Elements beyond the ends are taken to them.
        """

    @property
    def unbiased(self) -> bool:
        """Whether elements are rounded at random."""
        return self.stochastic

    @property
    def feedback(self) -> bool:
        """Off where elements are rounded at random: what is kept back would not shrink."""
        return not self.stochastic

    @property
    def contractive(self) -> bool:
        """Whether elements go to the nearest point: an error is then no larger than the element."""
        return not self.stochastic

    def wire_bytes_per_element(self, itemsize: int) -> float:
        """Return the bytes of an element among four ranks; see `mpicomp.kernels.cpu.fields_of`."""
        ranks, (coarse, *finer) = 4, self.scales
        return 8 / cpu.fields_of(2 * coarse * ranks) + len(finer) * 8 / cpu.fields_of(ranks)


@dataclass(frozen=True, repr=False)
class Learner(Compressor):
    """A compressor that sends values of a selection in a code that is learnt in the run.

    The joint choice takes one up where it is predicted to pay for all that it costs: see `mpicomp.policies.codes`.
    """

    message: ClassVar[str] = "code"
    learns: ClassVar[bool] = True
    selects_as: ClassVar[str]
    """The collective that delivers values of the same elements as they are."""

    @property
    @abstractmethod
    def ratio(self) -> float:
        """Kept fraction in (0, 1]."""

    @property
    @abstractmethod
    def training_steps(self) -> int:
        """Steps in which it learns."""

    @property
    @abstractmethod
    def learning(self) -> "Learner":
        """One that learns at every step. What it has learnt is there for this one: memories are the same."""

    @property
    @abstractmethod
    def at_once(self) -> "Learner":
        """One that learns from the first step on."""

    @abstractmethod
    def has_enough(self, numel: int) -> bool:
        """Return whether as many values of ``numel`` elements are selected as a code needs."""

    @abstractmethod
    def check_installed(self) -> None:
        """Raise `ConfigurationError` where a package that it `needs` is not installed."""


def check_ratio(subsystem: str, ratio: object) -> float:
    """Return a kept fraction back as a float, or say why it is none."""
    if isinstance(ratio, (int, float, np.integer, np.floating)) and not isinstance(ratio, bool) and 0 < ratio <= 1:
        return float(ratio)
    raise ConfigurationError(f"{subsystem}: ratio is the kept fraction and must be in (0, 1], got {ratio!r}")


def check_choice(subsystem: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Raise where a parameter is none of its choices."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ConfigurationError(f"{subsystem}: {name} must be {', '.join(others)} or {last}, got {value!r}")


def check_range(subsystem: str, name: str, value: object, least: float, most: float) -> None:
    """Raise where a parameter is no number from ``least`` to ``most``."""
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not least <= value <= most:  # type: ignore[operator]
        raise ConfigurationError(f"{subsystem}: {name} must be a number from {least} to {most}, got {value!r}")


def kept(ratio: float, numel: int) -> int:
    """Return the number of elements that a ratio keeps: the nearest integer, at least 1 where there are any.

    Examples
    --------
    >>> kept(0.01, 1000), kept(0.01, 3), kept(1.0, 7), kept(0.5, 0)
    (10, 1, 7, 0)
    """
    return min(numel, max(1, int(ratio * numel + 0.5)))
