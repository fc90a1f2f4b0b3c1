"""The settings in which configurations of one compressor differ."""

from collections.abc import Mapping, Sequence
from typing import Any


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each configuration the settings in which it differs from others of the same compressor, ratio aside.

    Examples
    --------
    >>> lgc = {"id": "lgc", "ratio": 0.01, "code": "linear", "instance": "ring"}
    >>> differing_settings([lgc, {**lgc, "code": "autoencoder"}, {**lgc, "ratio": 0.1}, {"id": "topk", "ratio": 0.01}])
    ['code=linear', 'code=autoencoder', 'code=linear', '']
    """
    words = []
    for own in configs:
        others = [other for other in configs if other["id"] == own["id"]]
        names = [name for name in own if name != "ratio" and any(other[name] != own[name] for other in others)]
        words.append(", ".join(f"{name}={own[name]}" for name in names))
    return words
