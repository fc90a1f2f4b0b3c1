"""Errors and sizes of a bucket's layers at every setting of a compressor, among which L-GreCo chooses."""

import functools
import glob
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors import Compressor, get_compressor
from mpicomp.compressors.base_compressor import match_layer_setting, num_kept
from mpicomp.compressors.kinds import packers
from mpicomp.compressors.quantize import MOST_BITS
from mpicomp.compressors.wire_format import message_bytes
from mpicomp.policies.policy import Shape
from mpicomp.policies.ratio_levels import ladder
from mpicomp.policies.surveys import Spectra, SpectrumSurvey, Survey
from mpicomp.systems.lgreco.layer_surveys import BitsSurvey, RankSurvey, SurveyPair, TailSurvey

Column = NDArray[Any]  # settings of one layer, ascending: ratios, ranks or bits

_STRIDE = 8  # a survey of selections or bits reads one group of elements in so many


class Table(ABC):
    """Layers of one bucket that can have different settings; errors are L2 norms of what ranks leave out."""

    survey: Survey | None  # of the bucket; None if no layer can have one

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
        """Return the settings that each layer may have: the candidates and that of ``base``."""

    @abstractmethod
    def errors(self, settings: Sequence[Column]) -> list[NDArray[np.float64]]:
        """Return the error of each layer at these settings."""

    @abstractmethod
    def sizes(self, settings: Sequence[Column], base: Compressor) -> list[NDArray[np.float64]]:
        """Return the bytes of each layer at these settings, as ``base`` sends it."""

    @abstractmethod
    def nbytes(self, chosen: Sequence[Any], base: Compressor) -> float:
        """Return the bytes of a whole message with one setting for each layer."""

    @abstractmethod
    def compressor(self, base: Compressor, chosen: Mapping[str, Any]) -> Compressor:
        """Return a compressor for this bucket with these settings, and those of ``base`` for the rest."""


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


class _LayerTable(Table):
    """A table of a compressor that has settings of layers; surveys give lost energies."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._taken: list[list[NDArray[np.float64]]] = []
        self._lost: list[NDArray[np.float64]] | None = None  # mean of these, by layer

    @property
    def known(self) -> bool:
        return self._lost is not None

    def observe(self, surveys: NDArray[np.float32]) -> None:
        lost = list(self._lost_in(surveys))
        if all(np.isfinite(errors).all() for errors in lost):
            self._taken.append(lost)

    @abstractmethod
    def _lost_in(self, surveys: NDArray[np.float32]) -> Iterable[NDArray[np.float64]]:
        """Return the energy that each layer loses at each candidate."""

    def update_errors(self) -> None:
        if self._taken:
            self._lost, self._taken = [np.mean(errors, axis=0) for errors in zip(*self._taken, strict=True)], []

    def compressor(self, base: Any, chosen: Mapping[str, Any]) -> Compressor:
        config = base.get_config()
        layers = {glob.escape(name): value for name, value in chosen.items()} | (config["layers"] or {})
        made = get_compressor(config | {"layers": layers or None})
        return made.bind(self._shape.names, self._shape.sizes, self._shape.shapes)


class _WholeSelections(_LayerTable):
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


class _Matrices(_LayerTable):
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
        return self._survey.lost(surveys, self._shape.sizes)

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


class _Quantized(_LayerTable):
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


class MixedTable(Table):
    """One layer that any of several compressors may send; the first one bounds errors and sizes."""

    def __init__(self, compressors: Sequence[Compressor], tables: Sequence[Table], shape: Shape) -> None:
        self._compressors, self._tables, self._shape = compressors, tables, shape
        self._candidates: list[tuple[int, Any]] = []
        for family, (compressor, table) in enumerate(zip(compressors, tables, strict=True)):
            columns = table.settings(compressor)
            if not columns and family == 0:
                self._candidates.append((0, None))
            self._candidates += [(family, value.item()) for column in columns for value in column]
        surveys = [table.survey for table in tables if table.survey is not None]
        self.survey = functools.reduce(SurveyPair, surveys) if surveys else None

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
