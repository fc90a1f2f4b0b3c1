"""Commands of mpicomp in labs, or as ranks on this host."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpicomp.bench.lab.lab_settings import LabError, parse_bandwidth, parse_latency
from mpicomp.bench.lab.launch import find_launcher, find_mpi
from mpicomp.bench.lab.run import check_requirements

from mpicomp.errors import ConfigurationError, MpicompError

_MPICOMP = (sys.executable, "-m", "mpicomp")


@dataclass(frozen=True)
class Network:
    """The links of a lab: as the command line of `mpicomp lab` writes them."""

    bandwidth: str
    latency: str

    @classmethod
    def read(cls, text: str) -> "Network":
        """Read ``bandwidth/latency``.

        >>> Network.read("50mbit/1ms")
        Network(bandwidth='50mbit', latency='1ms')
        """
        bandwidth, slash, latency = text.strip().partition("/")
        if not slash:
            raise ConfigurationError(f"lab: a network must be like 50mbit/1ms, got {text!r}")
        try:
            parse_bandwidth(bandwidth)
            parse_latency(latency)
        except LabError as error:
            raise ConfigurationError(f"lab: {str(error).removeprefix('--')}") from None
        return cls(bandwidth, latency)

    def __str__(self) -> str:
        return f"{self.bandwidth}/{self.latency}"


def options(networks: str) -> dict[str, tuple[Any, str, str]]:
    """Return the options of labs, with default networks."""
    links = "bandwidth and latency of each lab's links"
    return {"--hosts": (4, "N", "of each lab"), "--networks": (networks, "B/L[,..]", links)}


def read_networks(study: str, words: Sequence[str]) -> list[Network]:
    """Read networks; duplicates count once."""
    networks = list(dict.fromkeys(map(Network.read, words)))
    if not networks:
        raise ConfigurationError(f"{study}: --networks names nothing; write for example 50mbit/1ms")
    return networks


def check_lab(study: str) -> None:
    """Refuse to begin where no lab can be built on this machine."""
    try:
        check_requirements()
        find_launcher()
    except LabError as error:
        raise ConfigurationError(f"{study}: a lab {error}") from None


def run(
    hosts: int,
    network: Network | None,
    words: Sequence[str],
    watch: Callable[[str], None] = print,
) -> None:
    """Run a command with a rank on each host of a lab, or with as many ranks on this host.

    ``watch`` gets each line of its output; an error of it is raised with the last ones.
    """
    environment = dict(os.environ)
    if network is None:
        launcher = find_launcher()
        start = [str(launcher), "-n", str(hosts)]
        if find_mpi(launcher) == "openmpi":
            start.append("--oversubscribe")
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        # As many as in a lab: sums are then the same.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // hosts)))
    else:
        links = ["--bandwidth", network.bandwidth, "--latency", network.latency]
        start = [*_MPICOMP, "lab", "run", "--hosts", str(hosts), *links, "--"]
    process = subprocess.Popen(
        [*start, *_MPICOMP, *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    last: list[str] = []
    try:
        for line in process.stdout:
            last = [*last[-9:], line.rstrip()]
            watch(line.rstrip())
        status = process.wait()
    finally:
        process.terminate()  # where it has not ended, this process was interrupted
        process.wait()
        process.stdout.close()
    if status != 0:
        name = " ".join(["mpicomp", *words[:2]])
        raise MpicompError(f"{name} ended with status {status} at {network or 'one host'}: " + " | ".join(last))
