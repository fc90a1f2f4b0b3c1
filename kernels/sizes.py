"""Arithmetic of sizes of codes, and the names of kernels: the same on a host and on a device."""

from types import ModuleType
from typing import Any


def index_bytes(count: int, numel: int) -> int:
    """Return the length of the code of ``count`` indices below ``numel``, a multiple of 8.

    >>> index_bytes(0, 1000), index_bytes(1, 1), 8 * index_bytes(25_600, 25_600_000) / 25_600
    (0, 8, 11.955)
    """
    _, low, upper = layout_of(count, numel)
    return 8 * (low + upper)


def layout_of(count: int, numel: int) -> tuple[int, int, int]:
    """Return the number of low bits and the lengths of low parts and bitmap in words of 64 bits."""
    if count == 0:
        return 0, 0, 0
    # One more low bit costs ``count`` and halves a bitmap of ``numel >> bits`` zeros, so that the logarithm of
    # ``numel / count`` rounded down makes the shortest code.
    bits = max(0, (numel // count).bit_length() - 1)
    return bits, -(-count * bits // 64), -(-(count + ((numel - 1) >> bits) + 1) // 64)


SQUARES_BLOCK = 256
"""Elements of a few bits that share a base and a step; see `mpicomp.kernels.cpu.quadratic_levels`."""


def quadratic_bytes(count: int, bits: int) -> int:
    """Return the bytes that ``count`` elements of 2, 4 or 8 bits take, with the scales of their blocks; 8 times some.

    >>> quadratic_bytes(0, 4), quadratic_bytes(1, 4), quadratic_bytes(257, 2), 8 * quadratic_bytes(25_600, 4) / 25_600
    (0, 16, 88, 4.25)
    """
    return code_bytes(count, bits) + 8 * -(-count // SQUARES_BLOCK)


def code_bytes(count: int, bits: int) -> int:
    """Return the bytes of their codes alone, the last word of 8 bytes filled up."""
    return 8 * -(-count * bits // 64)


def public_names(names: dict[str, Any]) -> list[str]:
    """Return the names of a package's kernels, for its ``__all__``: those that it imports, except for modules."""
    return sorted(name for name, value in names.items() if name[0] != "_" and not isinstance(value, ModuleType))
