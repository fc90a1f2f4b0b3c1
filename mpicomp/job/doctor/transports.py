"""The transports that MPI uses inside a host and between hosts, inferred from its build, settings and adapters."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SHARED, TCP, UNKNOWN = "shared memory", "tcp", "unknown"

_RDMA = ("ib", "rc", "dc", "ud", "gga", "srd")  # how names of UCX's transports over adapters begin
_FORK_SAFE = ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE", "FI_EFA_FORK_SAFE")
_MEMORY = ("sm", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem")


@dataclass(frozen=True)
class Transports:
    """The transports inside a host and between hosts, such as ``"shared memory"``, ``"rdma"`` or ``"unknown"``."""

    library: str  # that MPI hands its messages to: "ucx", "ofi", "btl" (Open MPI's) or "unknown"
    inside: str
    between: str
    reason: str  # the evidence


def adapters(root: Path = Path("/sys/class")) -> list[str]:
    """Return the names of the adapters of this host that are more than Ethernet cards."""
    found = []
    for kind in ("infiniband", "cxi"):
        try:
            found += sorted(entry.name for entry in (root / kind).iterdir())
        except OSError:
            continue
    return found


def detect_transports(
    vendor: str, version: str, files: Collection[str], cards: Sequence[str], environ: Mapping[str, str] = os.environ
) -> Transports:
    """Return the transports that carry messages inside a host and between hosts.

    `vendor` and `version` come from ``mpi4py.MPI``, `files` are mapped into this process, `cards` are `adapters()`.

    >>> detect_transports("MPICH", "MPICH Device: ch4:ucx", [], [], {"UCX_TLS": "tcp,self"})
    Transports(library='ucx', inside='shared memory', between='tcp', reason='MPICH device ch4:ucx; UCX_TLS=tcp,self')
    """
    if vendor == "Open MPI":
        return _open_mpi(files, cards, environ)
    device = re.search(r"Device:\s*(ch\d:\S+)((?: +\w+)*)", version)
    if device is None:
        return Transports(UNKNOWN, UNKNOWN, UNKNOWN, f"{vendor} does not report its transports")
    reasons = [f"MPICH device {device[1]}{device[2]}"]
    no_local = (_setting("MPIR_CVAR_NOLOCAL", environ, reasons) or "0").lower() in ("1", "t", "true", "yes", "on")
    # Of several that were built in, the first one is taken.
    module = _setting("MPIR_CVAR_CH4_NETMOD", environ, reasons) or device[1].partition(":")[2]
    library, between = module, TCP
    if module == "ucx":
        _setting("UCX_TLS", environ, reasons)
        between = _ucx(files, cards, environ, reasons)
    elif module == "ofi":
        between = _ofi(cards, environ, reasons)
    elif module not in ("nemesis", "sock"):
        library, between = UNKNOWN, UNKNOWN
    return Transports(library, between if no_local else SHARED, between, "; ".join(reasons))


def _open_mpi(files: Collection[str], cards: Sequence[str], environ: Mapping[str, str]) -> Transports:
    reasons: list[str] = []
    pml = _setting("OMPI_MCA_pml", environ, reasons)
    if pml is None:
        # Open MPI takes UCX for adapters of this family alone, and leaves others to libfabric.
        family = [name for name in cards if name.startswith("mlx")]
        has_ucx = any("/libucp." in file for file in files)
        pml = "ucx" if family and has_ucx else "cm" if cards else "ob1"
        reasons.append(f"Open MPI's choice with {_listed(cards)}")
    if pml == "ucx":
        allowed = _setting("UCX_TLS", environ, reasons)
        between = _ucx(files, cards, environ, reasons)
        return Transports("ucx", SHARED if _permits(allowed, _MEMORY) else between, between, "; ".join(reasons))
    if pml == "cm":
        return Transports("ofi", SHARED, _ofi(cards, environ, reasons), "; ".join(reasons))
    if pml == "ob1":
        btl = _setting("OMPI_MCA_btl", environ, reasons)
        between = TCP if _permits(btl, ("tcp",)) else UNKNOWN
        return Transports("btl", SHARED if _permits(btl, ("sm", "vader")) else between, between, "; ".join(reasons))
    return Transports(UNKNOWN, UNKNOWN, UNKNOWN, "; ".join(reasons))


def _ucx(files: Collection[str], cards: Sequence[str], environ: Mapping[str, str], reasons: list[str]) -> str:
    devices = _setting("UCX_NET_DEVICES", environ, reasons)
    if not _permits(environ.get("UCX_TLS"), _RDMA) or not _permits(devices, cards):
        return TCP
    reasons.append(_listed(cards))
    if not cards:
        return TCP
    if not any("/libuct_ib" in file for file in files):
        reasons.append("UCX has not loaded its module for them")
        return TCP
    return "rdma"


def _ofi(cards: Sequence[str], environ: Mapping[str, str], reasons: list[str]) -> str:
    for name in ("MPIR_CVAR_OFI_USE_PROVIDER", "I_MPI_OFI_PROVIDER", "FI_PROVIDER"):
        provider = _setting(name, environ, reasons)
        if provider is not None:
            return TCP if provider in ("tcp", "sockets") else provider
    reasons.append(_listed(cards))
    if not cards:
        return TCP
    reasons.append("libfabric chooses its provider by itself; FI_PROVIDER names one")
    return UNKNOWN


def _setting(name: str, environ: Mapping[str, str], reasons: list[str]) -> str | None:
    value = environ.get(name)
    if value is not None:
        reasons.append(f"{name}={value}")
    return value


def _permits(setting: str | None, names: Sequence[str]) -> bool:
    # The setting lists beginnings of names that are allowed, or with ^ left out.
    if setting is None:
        return True
    words = setting.lstrip("^").split(",")
    met = [name for name in names if any(word.startswith(name) for word in words)]
    return len(met) < len(names) if setting.startswith("^") else bool(met) or "all" in words


def _listed(cards: Sequence[str]) -> str:
    return f"adapters {', '.join(cards)}" if cards else "no adapter but Ethernet"


@dataclass(frozen=True)
class ForkSafety:
    """Whether forking a process is dangerous while MPI runs, as DataLoader workers are forked."""

    method: str  # start method of `multiprocessing`: "fork", "forkserver" or "spawn"
    dangerous: bool  # whether a child breaks the memory that the network adapter has registered
    reason: str


def fork_safety(
    method: str, transports: Transports, cards: Sequence[str], environ: Mapping[str, str] = os.environ
) -> ForkSafety:
    """Return whether a fork is dangerous.

    >>> fork_safety("spawn", Transports("ucx", "shared memory", "rdma", ""), ["mlx5_0"], {}).dangerous
    False
    """
    if method != "fork":
        return ForkSafety(method, False, f"{method} starts processes that share no memory with MPI")
    if transports.between != "rdma" and not (cards and transports.between == UNKNOWN):
        reason = f"{transports.between} survives a fork, as long as the child makes no MPI call"
        return ForkSafety(method, False, reason)
    safe = next((f"{name}={environ[name]}" for name in _FORK_SAFE if environ.get(name, "0") != "0"), None)
    if safe is not None:
        return ForkSafety(method, False, f"{safe} keeps memory that {', '.join(cards)} has registered from the child")
    return ForkSafety(method, True, f"{', '.join(cards)} reads and writes memory that a forked child gets copies of")
