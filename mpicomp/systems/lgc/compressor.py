"""The compressor `LGC`: its settings, and which elements of a bucket are sent dense, selected and in a code."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import accumulate, groupby
from typing import Any, ClassVar, Self

from mpicomp.compressors.base_compressor import BucketParameters, Compressor, bound, num_kept
from mpicomp.compressors.wire import compact
from mpicomp.errors import ConfigurationError
from mpicomp.kernels import sizes
from mpicomp.registry import register
from mpicomp.setting_checks import check_choice, check_flag, check_least, check_range, check_ratio
from mpicomp.systems.lgc.autoencoder import Autoencoder
from mpicomp.workspace import Workspace

_MAX_FIRST_SHARE = 0.01  # of a model's parameters, of which the first layer has fewer if it travels dense
_MIN_LAYERS = 3  # with fewer of them no layer is an exception


@dataclass(frozen=True)
class Part:
    """Neighboring parameters of one layer."""

    start: int  # in the bucket
    stop: int
    kept: int  # elements sent
    travels: str  # "dense": all of them; "sparse": the selected ones uncoded; "coded": these in a code


@dataclass(frozen=True)
class Selected:
    """The parts of a bucket; places are those in the list of all elements that are sent, in the order of the bucket."""

    parts: tuple[Part, ...]

    @property
    def count(self) -> int:
        return sum(part.kept for part in self.parts)

    @property
    def indices(self) -> int:
        """Elements whose indices travel."""
        return sum(part.kept for part in self.parts if part.travels != "dense")

    @property
    def places(self) -> list[slice]:
        """The place of each part."""
        ends = accumulate(part.kept for part in self.parts)
        return [slice(end - part.kept, end) for part, end in zip(self.parts, ends, strict=True)]

    @property
    def coded_layers(self) -> list[slice]:
        """The place of each part that is coded."""
        return [place for part, place in zip(self.parts, self.places, strict=True) if part.travels == "coded"]

    @property
    def coded(self) -> slice:
        """The place of all coded elements, in one piece, since only the first and the last layer are exceptions."""
        layers = self.coded_layers
        return slice(layers[0].start, layers[-1].stop) if layers else slice(0, 0)

    @property
    def coded_count(self) -> int:
        return sum(part.kept for part in self.parts if part.travels == "coded")

    @property
    def regions(self) -> list[tuple[int, int, int]]:
        """Start, stop and number of elements of all parts from which some are selected."""
        return [(part.start, part.stop, part.kept) for part in self.parts if part.travels != "dense"]


@register
@dataclass(frozen=True, repr=False)
class LGC(Compressor):
    """The largest values of each layer, at one rank's indices, in a code learned in the run.

    Gradients travel dense for ``dense_steps``; for ``training_steps`` the largest values travel uncoded, and one
    rank learns the code from them, which it broadcasts at the end; from then on they travel in that code, a quarter as
    long. A layer is all parameters whose names differ only behind the last dot. A bucket with too few values for a code
    stays in the second phase, which its record shows.

    Parameters
    ----------
    ratio : float
        In (0, 1]: share of each layer's values that is selected. The paper's 0.001 is enough for models of some million
        parameters.
    instance : {"ring", "server"}
        ``"ring"``: the mean of all ranks' codes is decoded. ``"server"``: one rank's code is decoded for each rank, and
        innovations travel uncoded. Neither needs a server.
    dense_steps, training_steps : int
        Length of the first and the second phase.
    error : {"decoded", "selected"}
        Residual of selected values: the code's error (``"decoded"``), or nothing, as in the paper.
    innovation : float
        In (0, 1]: share of the selected values that travels uncoded with ``instance="server"``.
    signs : bool
        Whether the signs of the leading rank's values travel with its indices, a bit each, and values are coded
        relative to them.
    encoder, decoder : sequence of int
        Channels of the autoencoder; see `mpicomp.systems.lgc.autoencoder.Autoencoder`.
    learning_rate : float
        Of the autoencoder's training, at first.
    passes : int
        Optimizer steps in each step of the second phase.
    backward : bool
        Whether parameters come in the order of backward, the last layer first, as those of `mpicomp.torch` do.
    published : bool
        Set by `as_published`.

    Examples
    --------
    >>> names, sizes = ["out.weight", "out.bias", "mid.weight", "in.weight"], [90, 10, 19_850, 50]
    >>> compressor = LGC(ratio=0.01).bind(names, sizes)
    >>> [(part.kept, part.travels) for part in compressor.selected(20_000).parts]
    [(1, 'sparse'), (199, 'coded'), (50, 'dense')]
    """

    id: ClassVar[str] = "lgc"
    family: ClassVar[str] = "learned"
    message: ClassVar[str] = "own"
    needs_identical_blas: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Abrahamyan et al. 2021, arXiv 2103.08870; the code's own error stays in residuals, values relative to the "
        "selecting rank's signs and sizes, no server, Adam"
    )

    ratio: float = 0.01
    instance: str = "ring"
    dense_steps: int = 50
    training_steps: int = 150
    error: str = "decoded"
    innovation: float = 0.1
    signs: bool = True
    encoder: Sequence[int] = (8, 16, 16, 8)
    decoder: Sequence[int] = (8, 16, 16, 8)
    learning_rate: float = 0.01
    passes: int = 4
    backward: bool = True
    published: bool = field(default=False, kw_only=True)
    exceptions: tuple[str | None, str | None] | None = bound(None)
    """Names of the model's layers that travel dense, and sparse; None before the model is known."""
    parts: tuple[Part, ...] = bound(())  # the parts of a bucket, each with the number of its elements that are sent

    @classmethod
    def as_published(cls, **settings: Any) -> Self:
        """Return the paper's LGC, but for ``settings``."""
        values: dict[str, Any] = {
            "published": True,
            "ratio": 0.001,
            "dense_steps": 200,
            "training_steps": 300,
            "error": "selected",
            "signs": False,
            "encoder": (64, 128, 256, 64),
            "decoder": (32, 64, 128, 32),
            "learning_rate": 0.001,
            "passes": 1,
        }
        return cls.from_config(values | settings)

    def __post_init__(self) -> None:
        check_flag("lgc", "published", self.published)
        object.__setattr__(self, "ratio", check_ratio("lgc", self.ratio))
        check_choice("lgc", "instance", self.instance, ("ring", "server"))
        check_choice("lgc", "error", self.error, ("decoded", "selected"))
        check_range("lgc", "learning_rate", self.learning_rate, 0, 1)
        object.__setattr__(self, "innovation", check_ratio("lgc: innovation", self.innovation))
        for name, least in (("dense_steps", 0), ("training_steps", 1), ("passes", 1)):
            check_least(self.id, name, getattr(self, name), least)
        for name in ("signs", "backward"):
            check_choice(self.id, name, getattr(self, name), (True, False))
        for name in ("encoder", "decoder"):
            channels = getattr(self, name)
            if isinstance(channels, str) or not isinstance(channels, Sequence) or not channels:
                raise ConfigurationError(f"lgc: {name} must list numbers of channels, got {channels!r}")
            for number in channels:
                check_least(self.id, f"channels in {name}", number, 1)
            object.__setattr__(self, name, tuple(channels))
        if len(self.encoder) != len(self.decoder):
            raise ConfigurationError(
                "lgc: encoder and decoder must have as many layers, "
                f"got {len(self.encoder)} and {len(self.decoder)} channels"
            )

    @property
    def feedback(self) -> bool:
        return True

    can_fall_back_to_dense = False  # it learns from every step of its first phases

    def expected(self, numel: int) -> int:
        return self.selected(numel).count

    def wire_bytes_per_element(self, itemsize: int) -> float:
        # With the indices as if all ranks sent them
        numel = 1 << 20
        selected = self.selected(numel)
        nbytes = self.make_code(Workspace()).length(selected.count) * itemsize + index_bytes(selected.indices, numel)
        if self.instance == "server":
            nbytes += num_kept(self.innovation, selected.count) * (itemsize + 1)
        return (nbytes + selected.count / 8 * self.signs) / numel

    def bind_to(self, bucket: BucketParameters) -> Self:
        made = self
        if not bucket.warm_up:  # a code at the second step: costs are those of later steps
            made = replace(self, dense_steps=0, training_steps=1)
        exceptions = made.exceptions
        if bucket.model is not None or exceptions is None:
            sizes_here = dict(zip(bucket.names, bucket.sizes, strict=True))
            exceptions = made._exceptions_of(sizes_here if bucket.model is None else bucket.model)
        layers = _layers(bucket.names, bucket.sizes)
        coded = [place for place, (name, _) in enumerate(layers) if name not in exceptions]
        parts, start = [], 0
        for place, (name, size) in enumerate(layers):
            # Coded elements are in one piece, even if parameters of these layers stand in between.
            between = bool(coded) and coded[0] <= place <= coded[-1]
            travels = "coded" if between else "dense" if name == exceptions[0] else "sparse"
            parts.append(Part(start, start + size, size if travels == "dense" else num_kept(self.ratio, size), travels))
            start += size
        parts = [part for part in parts if part.stop > part.start]
        return replace(made, exceptions=exceptions, parts=tuple(parts))

    def _exceptions_of(self, model: Mapping[str, int]) -> tuple[str | None, str | None]:
        layers = _layers(list(model), list(model.values()))
        if not self.backward:
            layers.reverse()
        if len(layers) < _MIN_LAYERS:
            return None, None
        first, size = layers[-1]
        few = self.published or size < _MAX_FIRST_SHARE * sum(model.values())
        return first if few else None, layers[0][0]

    def selected(self, numel: int) -> Selected:
        """Return the elements to send of its bucket, or of any array of another length."""
        is_bucket = bool(self.parts) and self.parts[-1].stop == numel
        return Selected(self.parts if is_bucket else (Part(0, numel, num_kept(self.ratio, numel), "coded"),))

    def make_code(self, workspace: Workspace, seed: int = 0) -> Autoencoder:
        """Return a code that has learned nothing yet."""
        return Autoencoder(workspace, seed, self.encoder, self.decoder, self.learning_rate, self.passes, self.published)

    def check_installed(self) -> None:
        """Raise `ConfigurationError` without torch, which learning needs."""
        if find_spec("torch") is None:
            raise ConfigurationError("lgc: its code is trained with torch: pip install 'mpicomp[torch]'")


def index_bytes(count: int, numel: int) -> int:
    """Return the length of the indices of ``count`` elements of ``numel`` as they travel, a multiple of 8."""
    return -(-4 * count // 8) * 8 if compact(count, numel) == "plain" else sizes.index_bytes(count, numel)


def _layers(names: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, int]]:
    """Return the number of parameters of each layer: "encoder.0" for "encoder.0.weight", "weight" for "weight"."""
    layers = groupby(zip(names, sizes, strict=True), lambda pair: pair[0].rpartition(".")[0] or pair[0])
    return [(name, sum(size for _, size in members)) for name, members in layers]
