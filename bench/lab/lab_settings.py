"""Settings of a lab: hosts, ranks, links, and changes of the links with time."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


class LabError(ValueError):
    """Something the user has to change; its text tells how, without the leading ``lab:``."""


_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_NANOSECONDS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}

# Below 8 kbit/s a single frame of the emulated network takes seconds; above 1 Tbit/s tc's arithmetic ends.
_LEAST_BANDWIDTH = 8_000
_MOST_BANDWIDTH = 10**12
_MOST_LOSS = 0.5  # beyond, TCP gives connections up
_MOST_LATENCY_NS = 10 * 10**9


def _parse(option: str, text: str, units: Mapping[str, float], example: str) -> float:
    match = re.fullmatch(rf"(\d+(?:\.\d*)?|\.\d+)({'|'.join(units)})", text.strip(), re.IGNORECASE)
    if match is None:
        names = " or ".join(", ".join(units).rsplit(", ", 1))
        raise LabError(f"{option} must be a number with {names}, got {text!r}; write for example {example}")
    return float(match[1]) * units[match[2].lower()]


def parse_bandwidth(text: str, may_be_down: bool = False) -> int:
    """Return a bandwidth in bits a second."""
    bits = 0 if text.strip() == "0" and may_be_down else round(_parse("--bandwidth", text, _BITS, "1gbit or 200mbit"))
    if not (_LEAST_BANDWIDTH <= bits <= _MOST_BANDWIDTH or (bits == 0 and may_be_down)):
        raise LabError(f"--bandwidth must be between 8kbit and 1000gbit, got {text!r}")
    return bits


def parse_loss(text: str) -> float:
    """Return the share of packets that get lost."""
    share = _parse("--loss", text, {"%": 0.01}, "1%")
    if share > _MOST_LOSS:
        raise LabError(f"--loss must be a percentage from 0% to {_MOST_LOSS:.0%}, got {text!r}; write for example 1%")
    return share


def parse_latency(text: str) -> int:
    """Return a one-way latency in nanoseconds."""
    nanoseconds = round(_parse("--latency", text, _NANOSECONDS, "50us or 0us"))
    if nanoseconds > _MOST_LATENCY_NS:
        raise LabError(f"--latency must be at most 10s, got {text!r}")
    return nanoseconds


MOST_HOSTS = 200  # addresses are NET.1 to NET.(hosts) in one /24 each for data and control


@dataclass(frozen=True)
class Link:
    """The cable between one host and the switch: the same rate in both directions."""

    bandwidth: int  # bits a second, in each direction; 0 where it is down: packets wait
    # One way between two hosts with this link. Each cable has half of it: between hosts with different links it is the
    # mean of the two
    latency_ns: int


@dataclass(frozen=True)
class Change:
    """From `at_s` seconds after the start of the command the links are `links`."""

    at_s: float
    links: tuple[Link, ...]


@dataclass(frozen=True)
class Settings:
    """A checked description of one lab."""

    hosts: int
    ppn: int
    links: tuple[Link, ...]
    command: tuple[str, ...]
    mpi: str | None = None
    schedule: tuple[Change, ...] = field(default=())
    loss: float = 0.0  # share of packets that get lost on the way; with any, packets are as large as Ethernet's
    seed: int = 0  # seed of the choice of lost packets

    @property
    def all_links(self) -> tuple[Link, ...]:
        """Every state of every link, now and later."""
        return self.links + tuple(link for change in self.schedule for link in change.links)


def parse_links(bandwidth: str, latency: str, hosts: int, may_be_down: bool = False) -> tuple[Link, ...]:
    """Return one link a host from two comma lists of one value, or of one value a host; see `parse_bandwidth`."""
    found = {
        "--bandwidth": [parse_bandwidth(item, may_be_down) for item in bandwidth.split(",")],
        "--latency": [parse_latency(item) for item in latency.split(",")],
    }
    for option, values in found.items():
        if len(values) not in (1, hosts):
            raise LabError(
                f"{option} must have one value, or one for each of the {hosts} hosts, got {len(values)} values; "
                "change the list or --hosts"
            )
    columns = (values * hosts if len(values) == 1 else values for values in found.values())
    return tuple(Link(bits, nanoseconds) for bits, nanoseconds in zip(*columns, strict=True))


def make_settings(
    hosts: int,
    ppn: int,
    bandwidth: str,
    latency: str,
    command: Sequence[str],
    mpi: str | None = None,
    schedule: str | None = None,
    loss: str = "0%",
) -> Settings:
    """Check the user's settings."""
    if not 1 <= hosts <= MOST_HOSTS:
        raise LabError(f"--hosts must be between 1 and {MOST_HOSTS}, got {hosts}")
    if ppn < 1:
        raise LabError(f"--ppn must be at least 1, got {ppn}")
    if mpi not in (None, "mpich", "openmpi"):
        raise LabError(f"--mpi must be mpich or openmpi, got {mpi!r}")
    if not command or not command[0]:
        raise LabError("a command must follow the options, got none; write -- and then the command")
    links = parse_links(bandwidth, latency, hosts)
    changes: tuple[Change, ...] = ()
    if schedule is not None:
        try:
            text = Path(schedule).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise LabError(f"--schedule must be a file that can be read, got {schedule!r}: {reason}") from None
        changes = parse_schedule(text, hosts, name=schedule)
    return Settings(hosts, ppn, links, tuple(command), mpi, changes, parse_loss(loss))


def parse_schedule(text: str, hosts: int, name: str = "schedule") -> tuple[Change, ...]:
    """Return the changes in `text`; `name` stands in the messages."""
    changes: list[Change] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{name}, line {number}"
        if len(words) != 3:
            raise LabError(f"{where}: a line must be 'seconds bandwidth latency', got {line.strip()!r}")
        try:
            at_s = float(words[0])
        except ValueError:
            at_s = math.nan
        if not 0 <= at_s < math.inf:
            raise LabError(f"{where}: seconds must be a number of 0 or more, got {words[0]!r}")
        if changes and at_s < changes[-1].at_s:
            raise LabError(f"{where}: seconds must not go back, got {words[0]!r} after {changes[-1].at_s:g}")
        try:
            links = parse_links(words[1], words[2], hosts, may_be_down=True)
        except LabError as error:
            raise LabError(f"{where}: {str(error).removeprefix('--')}") from None
        changes.append(Change(at_s, links))
    if not changes:
        raise LabError(f"{name}: a schedule must have at least one line 'seconds bandwidth latency', got none")
    return tuple(changes)
