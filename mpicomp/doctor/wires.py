"""The transports that MPI uses inside a host and between hosts, as far as they can be told without using the network.

No library says which way it took. What it was built with, what the environment allows and which adapters the host has
leave few ways open; the reason names what the answer stands on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpicomp.system.launcher import Problem

SHARED, TCP, UNKNOWN = "shared memory", "tcp", "unknown"

_RDMA = ("ib", "rc", "dc", "ud", "gga", "srd")  # how names of UCX's transports over adapters begin
_MEMORY = ("sm", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem")


@dataclass(frozen=True)
class Wires:
    """The transports that carry messages inside a host and between hosts.

    Parameters
    ----------
    library
        The library that MPI hands its messages to: ``"ucx"``, ``"ofi"``, ``"btl"`` (Open MPI's own) or ``"unknown"``.
    inside, between
        ``"shared memory"``, ``"tcp"``, ``"rdma"``, the name of a libfabric provider, or ``"unknown"``.
    reason
        The evidence for it.
    """

    library: str
    inside: str
    between: str
    reason: str


def adapters(root: Path = Path("/sys/class")) -> list[str]:
    """Return the names of the adapters of this host that are more than Ethernet cards."""
    found = []
    for kind in ("infiniband", "cxi"):
        try:
            found += sorted(entry.name for entry in (root / kind).iterdir())
        except OSError:
            continue
    return found


def wires(
    vendor: str, version: str, files: Collection[str], found: Sequence[str], environ: Mapping[str, str] | None = None
) -> Wires:
    """Return the transports that carry messages inside a host and between hosts.

    Parameters
    ----------
    vendor
        The first item of ``mpi4py.MPI.get_vendor()``.
    version
        The whole text of ``mpi4py.MPI.Get_library_version()``.
    files
        The files mapped into this process, see `mpicomp.system.libraries.files`.
    found
        The result of `adapters`.
    environ
        The environment.

    Examples
    --------
    >>> wires("MPICH", "MPICH Device: ch4:ucx", [], [], {"UCX_TLS": "tcp,self"})
    Wires(library='ucx', inside='shared memory', between='tcp', reason='MPICH device ch4:ucx; UCX_TLS=tcp,self')
    """
    environ = os.environ if environ is None else environ
    if vendor == "Open MPI":
        return _open_mpi(files, found, environ)
    device = re.search(r"Device:\s*(ch\d:\S+)((?: +\w+)*)", version)
    if device is None:
        return Wires(UNKNOWN, UNKNOWN, UNKNOWN, f"{vendor} does not say what it was built with")
    reasons = [f"MPICH device {device[1]}{device[2]}"]
    alone = (_said("MPIR_CVAR_NOLOCAL", environ, reasons) or "0").lower() in ("1", "t", "true", "yes", "on")
    # Of several that were built in, the first one is taken.
    module = _said("MPIR_CVAR_CH4_NETMOD", environ, reasons) or device[1].partition(":")[2]
    library, between = module, TCP
    if module == "ucx":
        _said("UCX_TLS", environ, reasons)
        between = _ucx(files, found, environ, reasons)
    elif module == "ofi":
        between = _ofi(found, environ, reasons)
    elif module not in ("nemesis", "sock"):
        library, between = UNKNOWN, UNKNOWN
    return Wires(library, between if alone else SHARED, between, "; ".join(reasons))


def _open_mpi(files: Collection[str], found: Sequence[str], environ: Mapping[str, str]) -> Wires:
    reasons: list[str] = []
    pml = _said("OMPI_MCA_pml", environ, reasons)
    if pml is None:
        # Open MPI takes UCX for adapters of this family alone, and leaves others to libfabric.
        family = [name for name in found if name.startswith("mlx")]
        has_ucx = any("/libucp." in file for file in files)
        pml = "ucx" if family and has_ucx else "cm" if found else "ob1"
        reasons.append(f"Open MPI's choice with {_listed(found)}")
    if pml == "ucx":
        allowed = _said("UCX_TLS", environ, reasons)
        between = _ucx(files, found, environ, reasons)
        return Wires("ucx", SHARED if _permits(allowed, _MEMORY) else between, between, "; ".join(reasons))
    if pml == "cm":
        return Wires("ofi", SHARED, _ofi(found, environ, reasons), "; ".join(reasons))
    if pml == "ob1":
        btl = _said("OMPI_MCA_btl", environ, reasons)
        between = TCP if _permits(btl, ("tcp",)) else UNKNOWN
        return Wires("btl", SHARED if _permits(btl, ("sm", "vader")) else between, between, "; ".join(reasons))
    return Wires(UNKNOWN, UNKNOWN, UNKNOWN, "; ".join(reasons))


def _ucx(files: Collection[str], found: Sequence[str], environ: Mapping[str, str], reasons: list[str]) -> str:
    """Return the transport that UCX uses between hosts; ``UCX_TLS`` is among the reasons already where it is set."""
    devices = _said("UCX_NET_DEVICES", environ, reasons)
    if not _permits(environ.get("UCX_TLS"), _RDMA) or not _permits(devices, found):
        return TCP
    reasons.append(_listed(found))
    if not found:
        return TCP
    if not any("/libuct_ib" in file for file in files):
        reasons.append("UCX has not loaded its module for them")
        return TCP
    return "rdma"


def _ofi(found: Sequence[str], environ: Mapping[str, str], reasons: list[str]) -> str:
    """Return which provider libfabric takes between hosts."""
    for name in ("MPIR_CVAR_OFI_USE_PROVIDER", "I_MPI_OFI_PROVIDER", "FI_PROVIDER"):
        provider = _said(name, environ, reasons)
        if provider is not None:
            return TCP if provider in ("tcp", "sockets") else provider
    reasons.append(_listed(found))
    if not found:
        return TCP
    reasons.append("libfabric chooses its provider by itself; FI_PROVIDER names one")
    return UNKNOWN


def _said(name: str, environ: Mapping[str, str], reasons: list[str]) -> str | None:
    """Return a variable, and note it among the reasons if it is set."""
    value = environ.get(name)
    if value is not None:
        reasons.append(f"{name}={value}")
    return value


def _permits(said: str | None, names: Sequence[str]) -> bool:
    """Return whether a list of what is allowed, or with ``^`` of what is not, leaves some of these names.

    Names are beginnings: ``rc`` stands for ``rc_verbs`` and ``mlx5_0`` for ``mlx5_0:1``.
    """
    if said is None:
        return True
    words = said.lstrip("^").split(",")
    met = [name for name in names if any(word.startswith(name) for word in words)]
    return len(met) < len(names) if said.startswith("^") else bool(met) or "all" in words


def _listed(found: Sequence[str]) -> str:
    return f"adapters {', '.join(found)}" if found else "no adapter but Ethernet"


def wire_notes(carried: Wires, found: Sequence[str], most_ranks: int, hosts: int) -> list[Problem]:
    """Notice a fast network, or memory, that messages do not take.

    Parameters
    ----------
    carried
        The result of `wires`.
    found
        The result of `adapters`.
    most_ranks
        On one host.
    hosts
        Number of hosts.
    """
    notes = []
    if found and carried.between == TCP and hosts > 1:
        notes.append(
            Problem(
                f"there is {', '.join(found)}, but MPI talks tcp between hosts ({carried.reason})",
                "unset UCX_TLS UCX_NET_DEVICES OMPI_MCA_pml FI_PROVIDER; if that is not it, take the MPI of your site "
                "in place of a wheel",
            )
        )
    if carried.inside == TCP and most_ranks > 1:
        notes.append(
            Problem(
                f"ranks of one host talk tcp ({carried.reason})",
                "unset MPIR_CVAR_NOLOCAL UCX_TLS OMPI_MCA_btl, or add sm to the list",
            )
        )
    return notes
