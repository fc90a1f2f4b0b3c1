"""Errors and sizes of a bucket's layers at every setting of a compressor, among which L-GreCo chooses."""

import glob
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors import Compressor, get_compressor
from mpicomp.compressors.base_compressor import match_layer_setting, num_kept
from mpicomp.compressors.grid import MOST_BITS
from mpicomp.compressors.packing import packers
from mpicomp.compressors.wire_format import message_bytes
from mpicomp.policies.policy import Shape
from mpicomp.policies.ratio_levels import ladder
from mpicomp.policies.surveys import Spectra, SpectrumSurvey, Survey
from mpicomp.systems.lgreco.layer_surveys import BitsSurvey, Both, RankSurvey, TailSurvey

Column = NDArray[Any]
"""Settings of one layer, ascending: ratios, ranks or bits."""

_STRIDE = 8  # a survey of selections or bits reads one group of elements in so many


class Table(ABC):
    """Layers of one bucket that can have different settings.

    Errors are L2 norms, not squared, of what all ranks leave out of their accumulated gradients; energies are averaged
    over surveys.
    """

    survey: Survey | None
    """The survey that ranks make of the bucket; None where no layer can have one."""

    @property
    @abstractmethod
    def known(self) -> bool:
        """Whether there are surveys to compute errors from."""

    @abstractmethod
    def observe(self, surveys: NDArray[np.float32]) -> None:
        """Add the surveys of all ranks; they count after `update_errors`."""

    @abstractmethod
    def update_errors(self) -> None:
        """Compute errors from the surveys that were added since the last call, if any."""

    @abstractmethod
    def settings_of(self, base: Compressor) -> dict[str, Any]:
        """Return the settings that a compressor has for the layers, by name."""

    @abstractmethod
    def settings(self, base: Compressor) -> list[Column]:
        """Return the settings that each layer may have: the candidates and its setting in a compressor."""

    @abstractmethod
    def errors(self, settings: Sequence[Column]) -> list[NDArray[np.float64]]:
        """Return the error of each layer at these settings."""

    @abstractmethod
    def sizes(self, settings: Sequence[Column], base: Compressor) -> list[NDArray[np.float64]]:
        """Return the bytes of each layer at these settings, when it is sent as a compressor sends it."""

    @abstractmethod
    def nbytes(self, chosen: Sequence[Any], base: Compressor) -> float:
        """Return the bytes of a whole message with one setting for each layer."""

    @abstractmethod
    def compressor(self, base: Compressor, chosen: Mapping[str, Any]) -> Compressor:
        """Return a compressor for this bucket with these settings, and those of ``base`` for the rest."""


def table_for(compressor: Compressor, shape: Shape, span: float, whole: bool = False) -> Table:
    """Return the table of a bucket.

    Parameters
    ----------
    compressor : Compressor
        With the uniform setting, around which the candidates are. Where its ``layer_setting`` is ``"ratio"`` it has
        `ratio`, `layers` and `wire_for`, as `mpicomp.TopK` has; where that is ``"rank"``, `rank`, `rank_of`, `wire`,
        `min_compression_rate` and, within a bucket, `matrices`, as `mpicomp.PowerSGD` has; where that is ``"bits"``,
        `bits`, `bits_of`, `at_bits` and `bucket`, as `mpicomp.QSGD` has.
    shape : Shape
        The bucket.
    span : float
        Factor by which the candidates go below and above the uniform setting.
    whole : bool
        Whether surveys of selections and bits read all elements, and errors of selections are exact.
    """
    assert compressor.layer_setting is not None
    made: Table
    if compressor.layer_setting == "ratio" and whole:
        made = _WholeSelections(compressor, shape, span)
    elif compressor.layer_setting == "rank":
        made = _Matrices(compressor, shape, span)
    elif compressor.layer_setting == "bits":
        made = _Quantised(compressor, shape, span, 1 if whole else _STRIDE)
    else:
        made = _Selections(compressor, shape, span)
    return made


def mixed_table(compressors: Sequence[Compressor], tables: Sequence[Table], shape: Shape) -> Table:
    """Return the table of a bucket with one layer, which any of several compressors may send at any of its settings.

    Parameters
    ----------
    compressors : sequence of Compressor
        One for each family, with its uniform setting; that of the first one bounds errors and sizes.
    tables : sequence of Table
        The layer's table for each.
    shape : Shape
        The bucket.
    """
    return _Mixed(compressors, tables, shape)


class _Selections(Table):
    """Ratios: every layer is selected by itself."""

    def __init__(self, compressor: Any, shape: Shape, span: float) -> None:
        self._shape = shape
        self._ratios = np.array(ladder(compressor.ratio / span, min(1.0, compressor.ratio * span)))
        self._sizes = np.array(shape.sizes)
        self.survey: Survey | None = SpectrumSurvey(_STRIDE)
        self._mean: Spectra | None = None
        self._count = 0
        self._known: Spectra | None = None

    @property
    def known(self) -> bool:
        return self._known is not None

    def observe(self, surveys: NDArray[np.float32]) -> None:
        spectra = Spectra(self._shape.sizes, surveys)
        self._count += 1
        self._mean = spectra if self._mean is None else self._mean.mixed(spectra, 1 / self._count)

    def update_errors(self) -> None:
        if self._mean is not None:
            self._known, self._mean, self._count = self._mean, None, 0

    def settings_of(self, base: Any) -> dict[str, Any]:
        return {name: match_layer_setting(base.layers, name, base.ratio) for name in self._shape.names}

    def settings(self, base: Any) -> list[Column]:
        return [np.sort(np.append(self._ratios, ratio)) for ratio in self.settings_of(base).values()]

    def errors(self, settings: Sequence[Column]) -> list[NDArray[np.float64]]:
        assert self._known is not None
        return list(np.sqrt(self._known.lost(self._counts(settings) / self._sizes[:, None])))

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

    def compressor(self, base: Any, chosen: Mapping[str, Any]) -> Compressor:
        return _within(base, chosen, self._shape)

    def _counts(self, settings: Sequence[Column]) -> NDArray[np.int64]:
        """Return the elements that layers keep, shape (layers, settings)."""
        pairs = zip(settings, self._shape.sizes, strict=True)
        return np.array([[num_kept(ratio, size) for ratio in column] for column, size in pairs])

    def _message(self, count: int, base: Any) -> float:
        numel = self._shape.numel
        return message_bytes(count, numel, self._shape.dtype, base.wire_for(count, numel))


class _WholeSelections(_Selections):
    """Ratios, with errors from all elements at the candidates; at other ratios they are interpolated."""

    def __init__(self, compressor: Any, shape: Shape, span: float) -> None:
        super().__init__(compressor, shape, span)
        ratios = sorted({*self._ratios.tolist(), compressor.ratio})
        self._kept = [np.unique([num_kept(ratio, size) for ratio in ratios]) for size in shape.sizes]
        self._tails = TailSurvey(self._kept)
        self.survey = self._tails
        self._taken: list[list[NDArray[np.float64]]] = []
        self._lost: list[NDArray[np.float64]] | None = None

    @property
    def known(self) -> bool:
        return self._lost is not None

    def observe(self, surveys: NDArray[np.float32]) -> None:
        lost = self._tails.lost(surveys)
        if all(np.isfinite(errors).all() for errors in lost):
            self._taken.append(lost)

    def update_errors(self) -> None:
        if self._taken:
            self._lost = [np.mean(errors, axis=0) for errors in zip(*self._taken, strict=True)]
            self._taken = []

    def errors(self, settings: Sequence[Column]) -> list[NDArray[np.float64]]:
        assert self._lost is not None
        parts = zip(self._counts(settings), self._kept, self._lost, strict=True)
        return [np.sqrt(np.interp(counts, known, lost)) for counts, known, lost in parts]


class _Matrices(Table):
    """Ranks: matrices that are compressed at the uniform rank; the rest is not looked at."""

    def __init__(self, compressor: Any, shape: Shape, span: float) -> None:
        self._shape = shape
        found = {matrix.start: matrix for matrix in compressor.bind(shape.names, shape.sizes, shape.shapes).matrices}
        starts = np.cumsum([0, *shape.sizes])[:-1].tolist()
        self._matrices = {name: found[start] for name, start in zip(shape.names, starts, strict=True) if start in found}
        self._ranks: list[tuple[int, int]] = []
        for matrix in self._matrices.values():
            # Above this rank it would travel dense, or be no smaller for being of lower rank than its sides.
            worth = matrix.rows * matrix.columns / ((matrix.rows + matrix.columns) * compressor.min_compression_rate)
            most = min(math.ceil(compressor.rank * span), matrix.rows, matrix.columns, math.ceil(worth) - 1)
            least = min(max(1, math.floor(compressor.rank / span)), most)
            self._ranks.append((least, max(least, most)))
        self._survey = RankSurvey(list(self._matrices.values()), self._ranks)
        self.survey = self._survey if self._matrices else None
        self._taken: list[list[NDArray[np.float64]]] = []
        self._lost: list[NDArray[np.float64]] | None = None if self._matrices else []

    @property
    def known(self) -> bool:
        return self._lost is not None

    def observe(self, surveys: NDArray[np.float32]) -> None:
        lost = self._survey.lost(surveys, self._shape.sizes)
        if all(np.isfinite(errors).all() for errors in lost):
            self._taken.append(lost)

    def update_errors(self) -> None:
        if self._taken:
            self._lost = [np.mean(errors, axis=0) for errors in zip(*self._taken, strict=True)]
            self._taken = []

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

    def compressor(self, base: Any, chosen: Mapping[str, Any]) -> Compressor:
        return _within(base, chosen, self._shape)


class _Quantised(Table):
    """Bits: of every layer, whatever its size."""

    def __init__(self, compressor: Any, shape: Shape, span: float, stride: int) -> None:
        self._shape = shape
        least = max(compressor.least_bits, math.floor(compressor.bits / span))
        asked = range(least, min(MOST_BITS, math.ceil(compressor.bits * span)) + 1)
        # Where residuals shrink at the uniform bits they are to do so at all.
        self._bits = [bits for bits in asked if compressor.at_bits(bits).contractive or not compressor.contractive]
        self._survey = BitsSurvey([compressor.at_bits(bits) for bits in self._bits], compressor.bucket, stride)
        self.survey = self._survey
        self._taken: list[NDArray[np.float64]] = []
        self._lost: NDArray[np.float64] | None = None

    @property
    def known(self) -> bool:
        return self._lost is not None

    def observe(self, surveys: NDArray[np.float32]) -> None:
        lost = self._survey.lost(surveys, self._shape.sizes)
        if np.isfinite(lost).all():
            self._taken.append(lost)

    def update_errors(self) -> None:
        if self._taken:
            self._lost, self._taken = np.mean(self._taken, axis=0), []

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

    def compressor(self, base: Any, chosen: Mapping[str, Any]) -> Compressor:
        return _within(base, chosen, self._shape)


class _Mixed(Table):
    """Candidates of several compressors: a setting is a place in their list.

    Where the first compressor leaves the layer dense, it is dense by the first candidate.
    """

    def __init__(self, compressors: Sequence[Compressor], tables: Sequence[Table], shape: Shape) -> None:
        self._compressors, self._tables, self._shape = compressors, tables, shape
        self._candidates: list[tuple[int, Any]] = []
        for family, (compressor, table) in enumerate(zip(compressors, tables, strict=True)):
            columns = table.settings(compressor)
            if not columns and family == 0:
                self._candidates.append((0, None))
            self._candidates += [(family, value.item()) for column in columns for value in column]
        self.survey = None
        for table in tables:
            if table.survey is not None:
                self.survey = table.survey if self.survey is None else Both(self.survey, table.survey)

    @property
    def known(self) -> bool:
        return all(table.known for table in self._tables)

    def observe(self, surveys: NDArray[np.float32]) -> None:
        start = 0
        for table in self._tables:
            if table.survey is not None:
                stop = start + table.survey.width(self._shape.sizes)
                table.observe(surveys[:, start:stop])
                start = stop

    def update_errors(self) -> None:
        for table in self._tables:
            table.update_errors()

    def settings_of(self, base: Compressor) -> dict[str, Any]:
        first = self._tables[0].settings_of(base)
        [name] = self._shape.names
        return {name: self._candidates.index((0, first.get(name)))}

    def settings(self, base: Compressor) -> list[Column]:
        return [np.arange(len(self._candidates))]

    def errors(self, settings: Sequence[Column]) -> list[NDArray[np.float64]]:
        found = [np.zeros(1)] if self._candidates[0] == (0, None) else []
        for compressor, table in zip(self._compressors, self._tables, strict=True):
            found += table.errors(table.settings(compressor))
        return [np.concatenate(found)]

    def sizes(self, settings: Sequence[Column], base: Compressor) -> list[NDArray[np.float64]]:
        return [np.array([self.nbytes([place], base) for place in settings[0].tolist()])]

    def nbytes(self, chosen: Sequence[Any], base: Compressor) -> float:
        family, value = self._candidates[chosen[0]]
        if value is None:
            return float(self._shape.numel * self._shape.dtype.itemsize)
        nbytes: float = self._tables[family].nbytes([value], self._compressors[family])
        return nbytes

    def compressor(self, base: Compressor, chosen: Mapping[str, Any]) -> Compressor:
        shape = self._shape
        family, value = self._candidates[chosen[shape.names[0]]]
        chosen_family = self._compressors[family]
        if value is not None:
            assert chosen_family.layer_setting is not None
            chosen_family = get_compressor(chosen_family.get_config() | {chosen_family.layer_setting: value})
        made: Compressor = chosen_family.bind(shape.names, shape.sizes, shape.shapes)
        return made


def _within(base: Compressor, chosen: Mapping[str, Any], shape: Shape) -> Compressor:
    """Return a compressor with settings for layers of these names alone, and for the rest what it has."""
    config = base.get_config()
    layers = {glob.escape(name): value for name, value in chosen.items()} | (config["layers"] or {})
    made = get_compressor(config | {"layers": layers or None})
    return made.bind(shape.names, shape.sizes, shape.shapes)
