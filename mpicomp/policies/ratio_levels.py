"""The compressors and ratios that policies choose from."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.compressors import COMPRESSORS, Compressor, Quantiser, TopK
from mpicomp.errors import ConfigurationError
from mpicomp.policies.surveys import Spectra
from mpicomp.setting_checks import check_ratio


def check_ratios(policy: str, least: object, most: object) -> None:
    """Raise unless two ratios are a range in (0, 1]."""
    for name, ratio in (("least", least), ("most", most)):
        check_ratio(policy, ratio, name)
    if least > most:  # type: ignore[operator]
        raise ConfigurationError(f"{policy}: least must not be above most, got least={least} and most={most}")


def default_compressor() -> Compressor:
    """Return the compressor that policies choose settings of unless the user names one: top-k."""
    return TopK()


def suggested_compressors(
    named: Compressor | None, normalises: bool = True
) -> tuple[list[Compressor], list[Quantiser]]:
    """Return the compressor with a ratio that the user named; else those, and the quantizers, that classes suggest."""
    if named is not None:
        return [named], []
    names = sorted(COMPRESSORS.names(), key=lambda name: COMPRESSORS.plugin(name) is not None)
    # A class that derives from another one suggests the same.
    classes = map(COMPRESSORS.cls, names)
    suggested: list[Any] = list(dict.fromkeys(each for cls in classes for each in cls.suggested(normalises)))
    return (
        [compressor for compressor in suggested if compressor.selects_by_ratio],
        [compressor for compressor in suggested if compressor.message == "packed"],
    )


def check_adaptable(policy: str, compressor: Compressor, problem: str = "", layers: bool = False) -> None:
    """Raise the problem if a compressor does not select by a ratio; raise for ratios of layers unless allowed."""
    if not compressor.selects_by_ratio:
        problem = problem or f"needs the gain at other ratios, which {compressor.id} cannot give"
        raise ConfigurationError(
            f"{policy}: {problem}; use a compressor that selects elements by a ratio, such as topk, sidco or randomk, "
            "or policy='static'"
        )
    if getattr(compressor, "layers", None) and not layers:
        raise ConfigurationError(
            f"{policy}: chooses ratios by itself, so {compressor.id} cannot have ratios of its own for layers; "
            "leave layers out, or use policy='static'"
        )


def at_ratio(compressor: Compressor, ratio: float) -> Compressor:
    """Return a compressor with another ratio."""
    return replace(compressor, ratio=ratio)  # type: ignore[call-arg]


def ladder(least: float, most: float, step: float = math.sqrt(2)) -> list[float]:
    """Return ratios from the least to the most one, each at most ``step`` times the one before."""
    count = max(1, math.ceil(math.log(most / least) / math.log(step) - 1e-9))
    return [float(f"{least * (most / least) ** (index / count):.4g}") for index in range(count + 1)]


def lost_share(compressor: Compressor, spectra: Spectra, ratios: Sequence[float]) -> NDArray[np.float64]:
    """Return the share of a bucket's energy that a compressor leaves out at each ratio."""
    kept = np.asarray(ratios, float)
    if not compressor.by_magnitude:
        return 1 - kept
    energy = float(spectra.energies.sum())
    return spectra.lost_together(kept) / energy if energy > 0 else np.zeros(kept.size)
