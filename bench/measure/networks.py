"""Benchmarks on emulated clusters: a lab for each network, in a process of its own."""

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpicomp.bench.lab.errors import LabError
from mpicomp.bench.lab.launch import find_launcher
from mpicomp.bench.lab.run import check_requirements
from mpicomp.bench.lab.units import parse_bandwidth, parse_latency
from mpicomp.bench.measure.jobs import MPICOMP

from mpicomp.errors import ConfigurationError, MpicompError


@dataclass(frozen=True)
class Network:
    """The links of a lab: as the command line of `mpicomp lab` writes them."""

    bandwidth: str
    latency: str

    @classmethod
    def read(cls, text: str) -> "Network":
        """Read ``bandwidth/latency``.

        Examples
        --------
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
        """Write it as it is read."""
        return f"{self.bandwidth}/{self.latency}"


def read(command: str, text: str) -> list[Network]:
    """Read networks with commas between them; duplicates count once.

    Raises
    ------
    ConfigurationError
        Where one cannot be read, or nothing is named.
    """
    networks = list(dict.fromkeys(Network.read(word) for word in text.split(",") if word.strip()))
    if not networks:
        raise ConfigurationError(f"{command}: --networks names nothing; write for example 50mbit/1ms")
    return networks


def check_lab(command: str) -> None:
    """Raise early where no lab can be built on this machine.

    Raises
    ------
    ConfigurationError
        What is missing, and what to do.
    """
    try:
        check_requirements()
        find_launcher()
    except LabError as error:
        raise ConfigurationError(f"{command}: a lab {error}") from None


def run_in_lab(
    hosts: int,
    network: Network,
    words: Sequence[str],
    lab: Sequence[str] = (),
    watch: Callable[[str], None] = print,
    program: Sequence[str] = MPICOMP,
) -> None:
    """Run a program on an emulated cluster, to its end.

    Parameters
    ----------
    hosts : int
        One rank on each.
    network : Network
        Their links.
    words : sequence of str
        After the program: its own.
    lab : sequence of str
        More words for ``mpicomp lab run``.
    watch : callable
        Is given every line of output.
    program : sequence of str
        What is run, ``mpicomp`` if not given.

    Raises
    ------
    MpicompError
        Where it fails; the message ends with its last lines.
    """
    links = ["--hosts", str(hosts), "--bandwidth", network.bandwidth, "--latency", network.latency]
    process = subprocess.Popen(
        [*MPICOMP, "lab", "run", *links, *lab, "--", *program, *words],
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
        process.terminate()  # where it has not ended, whoever waits for it was interrupted
        process.wait()
        process.stdout.close()
    if status != 0:
        name = " ".join([Path(program[-1]).stem, *words[:2]])
        raise MpicompError(f"lab: {name} ended with status {status} at {network}: " + " | ".join(last))


def rows_in_lab(
    hosts: int, network: Network, options: Sequence[str], watch: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run ``mpicomp bench collectives`` in a lab; return its rows, each with its network, and what it ran on."""
    with tempfile.TemporaryDirectory(prefix="mpicomp-bench-") as folder:
        path = Path(folder) / "rows.json"
        run_in_lab(hosts, network, ["bench", "collectives", *options, "--json", str(path)], watch=watch)
        written = json.loads(path.read_text())
    links = {"bandwidth": network.bandwidth, "latency": network.latency}
    return [links | row for row in written["rows"]], written["environment"]["job"]
