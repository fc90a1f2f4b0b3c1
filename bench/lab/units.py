"""Bandwidths and latencies as they are written on the command line and in schedule files."""

import re


class LabError(ValueError):
    """Something the user has to change; its text says what and how, without the leading ``lab:``."""


_NUMBER = r"(?P<number>\d+(?:\.\d*)?|\.\d+)"
_BANDWIDTH = re.compile(_NUMBER + r"(?P<unit>bit|kbit|mbit|gbit)", re.IGNORECASE)
_LATENCY = re.compile(_NUMBER + r"(?P<unit>ns|us|ms|s)", re.IGNORECASE)
_LOSS = re.compile(_NUMBER + "%")
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}

# Below 8 kbit/s a single frame of the emulated network takes seconds; above 1 Tbit/s tc's arithmetic ends.
_LEAST_BANDWIDTH = 8_000
_MOST_BANDWIDTH = 10**12
_MOST_LOSS = 0.5  # beyond, TCP gives connections up
_MOST_LATENCY_NS = 10 * 10**9


def parse_bandwidth(text: str, may_be_down: bool = False) -> int:
    """Return a bandwidth in bits a second.

    Examples
    --------
    >>> parse_bandwidth("2.5gbit")
    2500000000
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    if may_be_down and (text.strip() == "0" or (match is not None and float(match["number"]) == 0)):
        return 0
    if match is None:
        raise LabError(
            f"--bandwidth must be a number with bit, kbit, mbit or gbit, got {text!r}; "
            "write for example 1gbit or 200mbit"
        )
    bits = round(float(match["number"]) * _BITS[match["unit"].lower()])
    if not _LEAST_BANDWIDTH <= bits <= _MOST_BANDWIDTH:
        raise LabError(f"--bandwidth must be between 8kbit and 1000gbit, got {text!r}")
    return bits


def parse_loss(text: str) -> float:
    """Return the share of packets that get lost.

    Examples
    --------
    >>> parse_loss("0.5%")
    0.005
    """
    match = _LOSS.fullmatch(text.strip())
    share = float(match["number"]) / 100 if match is not None else -1.0
    if not 0 <= share <= _MOST_LOSS:
        raise LabError(f"--loss must be a percentage from 0% to {_MOST_LOSS:.0%}, got {text!r}; write for example 1%")
    return share


def parse_latency(text: str) -> int:
    """Return a one-way latency in nanoseconds.

    Examples
    --------
    >>> parse_latency("50us")
    50000
    """
    match = _LATENCY.fullmatch(text.strip())
    if match is None:
        raise LabError(f"--latency must be a number with ns, us, ms or s, got {text!r}; write for example 50us or 0us")
    nanoseconds = round(float(match["number"]) * _NANOSECONDS[match["unit"].lower()])
    if nanoseconds > _MOST_LATENCY_NS:
        raise LabError(f"--latency must be at most 10s, got {text!r}")
    return nanoseconds


def format_bandwidth(bits: int) -> str:
    """Return a bandwidth as tc reads it.

    Examples
    --------
    >>> format_bandwidth(2_500_000_000)
    '2500mbit'
    """
    for unit in ("gbit", "mbit", "kbit"):
        if bits % _BITS[unit] == 0:
            return f"{bits // _BITS[unit]}{unit}"
    return f"{bits}bit"
