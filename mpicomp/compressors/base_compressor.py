"""The base class of compressors: a frozen set of parameters with a name that turns an array into a message."""

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Self

from mpicomp.errors import ConfigurationError, UnknownNameError
from mpicomp.registry import Configurable, Registry

_BOUND = "bound"


@dataclass(frozen=True)
class Entry:
    """Clipping and momentum that are applied to a gradient before it is added to the residual.

    Parameters
    ----------
    clip : float or None
        Each rank scales its gradients down to an L2 norm of at most ``clip / sqrt(ranks)``, over all its arrays. None
        leaves them unclipped.
    momentum : float
        If not 0, the velocity ``u = momentum * u + gradient`` is added instead of the gradient.
    nesterov : bool
        Nesterov momentum: ``u = momentum * (u + gradient)``, and ``u + gradient`` is added.
    masking : bool
        Whether the velocity of sent elements is set to zero.
    """

    clip: float | None = None
    momentum: float = 0.0
    nesterov: bool = False
    masking: bool = True


@dataclass(frozen=True)
class BucketParameters:
    """The parameters in a bucket, as `Compressor.bind` describes them."""

    names: Sequence[str]
    sizes: Sequence[int]
    shapes: Sequence[tuple[int, ...]]
    model: Mapping[str, int] | None
    warm_up: bool


@dataclass(frozen=True, repr=False)
class Compressor(metaclass=Configurable):
    """A frozen dataclass whose fields are its parameters, each with a default; its state is in a bucket's memory."""

    kind: ClassVar[str] = "compressor"
    id: ClassVar[str]
    """The name in the registry."""
    family: ClassVar[str]
    """``"dense"``, ``"sparsifier"``, ``"quantiser"`` ..."""
    message: ClassVar[str]
    """Kind of message: ``"sparse"`` (some elements), ``"packed"`` (all, in few bits), ``"dense"`` (an array that ranks
    can sum) or ``"own"`` (carried by its own collective alone).
    """
    shares_positions: ClassVar[bool] = False
    """Whether the elements of sparse messages are the same on all ranks: their values are summed as a short array."""
    averages: ClassVar[bool] = True
    """Whether the mean is that of parts of the bucket, and of means of some ranks: not of votes, nor of matrices."""
    paper: ClassVar[str]
    """The paper that the compressor comes from, and the deviations from it."""
    layer_setting: ClassVar[str | None] = None
    """The setting that ``layers`` sets by names of parameters: ``"ratio"``, ``"rank"`` or ``"bits"``; else None."""
    needs_identical_blas: ClassVar[bool] = False
    """Whether the mean depends on matrix products of a library, whose bits differ between GPU and host: all ranks'
    gradients then have to be on the same kind of device.
    """

    def __repr__(self) -> str:
        """Name the parameters that are not at their defaults."""
        values = {entry.name: (getattr(self, entry.name), entry.default) for entry in _parameters(type(self))}
        shown = [f"{name}={value!r}" for name, (value, default) in values.items() if value != default]
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    @abstractmethod
    def feedback(self) -> bool:
        """Whether it runs with error feedback by default."""

    @property
    def contractive(self) -> bool:
        """Whether the residual shrinks from step to step under error feedback; if not, feedback is refused."""
        return True

    @property
    def contractive_variant(self) -> "Compressor | None":
        """A form that contracts: the compressor itself if it does, None without one."""
        return self if self.contractive else None

    @property
    def unbiased(self) -> bool:
        """Whether the message is unbiased: exact in expectation over its random choices."""
        return False

    can_fall_back_to_dense = True
    """Whether a dense step may replace it: it delivers means of gradients, learns nothing and keeps no momentum."""
    by_magnitude = True
    """Whether it selects the largest elements, at least nearly."""
    gpu_sources: ClassVar[Sequence[str]] = ()
    """Sources of ``mpicomp.kernels.gpu`` that its exchanges need, to be compiled at a time; others are when needed."""

    @property
    def selects_by_ratio(self) -> bool:
        """Whether a parameter ``ratio`` sets the number of selected elements, so that policies may choose it."""
        return self.message == "sparse" and any(entry.name == "ratio" for entry in fields(self))

    @classmethod
    def suggested(cls, normalises: bool = True) -> "Sequence[Compressor]":
        """Return the settings, mostly none, among which ``policy="auto"`` chooses if no compressor is named.

        They select the largest elements by a ratio, which the policy sets, or pack all. They may differ where the
        optimizer ``normalises``, as Adam does.
        """
        return ()

    @property
    def entry(self) -> Entry:
        """Clipping and momentum before gradients are added to the residual; by default neither."""
        return Entry()

    def bind(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        shapes: Sequence[tuple[int, ...]] = (),
        *,
        model: Mapping[str, int] | None = None,
        warm_up: bool = True,
    ) -> Self:
        """Return the compressor for a bucket of these parameters: itself, unless `bind_to` is overridden.

        ``model`` has the sizes of all parameters of the model, by default those of the bucket. ``warm_up=False`` makes
        first steps like all others.
        """
        return self.bind_to(BucketParameters(names, sizes, shapes or [(size,) for size in sizes], model, warm_up))

    def bind_to(self, bucket: BucketParameters) -> Self:
        """Return the compressor for a bucket, whose own values are in fields made by `bound`."""
        return self

    def expected(self, numel: int) -> int:
        """Return the number of elements out of ``numel`` that are expected to be sent, for costs and buffer sizes."""
        return numel

    @abstractmethod
    def wire_bytes_per_element(self, itemsize: int) -> float:
        """Average bytes of message, without headers, for one element of the array."""

    def _set(self, **settings: Any) -> None:
        """Store checked settings, in `__post_init__` only: the dataclass is frozen."""
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    def get_config(self) -> dict[str, Any]:
        """Return a JSON-able configuration that `mpicomp.get_compressor` turns into an equal compressor."""
        return {"id": self.id} | {field.name: getattr(self, field.name) for field in _parameters(type(self))}

    @classmethod
    def from_config(cls, parameters: Mapping[str, Any]) -> Self:
        """Build a compressor from its parameters."""
        known = [field.name for field in _parameters(cls)]
        for name in parameters:
            if name not in known:
                if not known:
                    raise ConfigurationError(f"{cls.id}: has no parameters, got '{name}'")
                raise UnknownNameError(f"{cls.id} parameter", name, known)
        return cls(**parameters)


COMPRESSORS: Registry[Compressor] = Registry("compressor", ["mpicomp.compressors", "mpicomp.systems"])


@functools.cache
def _parameters(compressor: type[Compressor]) -> list[Field[Any]]:
    parameters = [entry for entry in fields(compressor) if _BOUND not in entry.metadata]
    return sorted(parameters, key=lambda entry: bool(entry.kw_only))


def bound(default: Any) -> Any:
    """Return a field that `Compressor.bind_to` sets: it is no parameter, and in no configuration."""
    return field(default=default, kw_only=True, metadata={_BOUND: True})


def match_layer_setting(layers: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """Return the setting of the first pattern that matches a parameter's name, or the default.

    >>> match_layer_setting({"embedding.*": 8, "*": 4}, "embedding.weight", 2)
    8
    """
    return next((setting for pattern, setting in (layers or {}).items() if fnmatchcase(name, pattern)), default)


@functools.lru_cache(4096)  # every selection asks
def num_kept(ratio: float, numel: int) -> int:
    """Return the number of elements that a ratio keeps: the nearest integer, at least 1 where there are any.

    >>> num_kept(0.01, 1000), num_kept(0.01, 3), num_kept(1.0, 7), num_kept(0.5, 0)
    (10, 1, 7, 0)
    """
    return min(numel, max(1, int(ratio * numel + 0.5)))
