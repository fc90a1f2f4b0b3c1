"""Commands as processes, on this host or in labs: jobs whose files are complete are not run again."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpicomp.bench.lab.lab_settings import LabError, parse_bandwidth, parse_latency
from mpicomp.bench.lab.launch import find_launcher, find_mpi
from mpicomp.bench.lab.run import check_requirements

from mpicomp.errors import ConfigurationError, MpicompError

DONE, FAILED, CUT = "done", "failed", "cut"

MPICOMP = (sys.executable, "-m", "mpicomp")  # first words of a command of this package

_LONGEST_S = 1800.0  # seconds that a job may take before it is ended
_ENDING_S = 30.0  # seconds that a process has to end after SIGTERM
_OVER = "not run to its end: the time was over"


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


def add_lab(parser: argparse.ArgumentParser, networks: str | None, shown: str = "%(default)s") -> None:
    """Declare the hosts and the networks of labs, with default networks, and what the help shows as these."""
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="of each lab (%(default)s)")
    links = f"bandwidth and latency of each lab's links ({shown})"
    parser.add_argument("--networks", default=networks, metavar="B/L[,..]", help=links)


def read_networks(study: str, text: str) -> list[Network]:
    """Read networks with commas between them; duplicates count once."""
    networks = list(dict.fromkeys(Network.read(word) for word in text.split(",") if word.strip()))
    if not networks:
        raise ConfigurationError(f"{study}: --networks names nothing; write for example 50mbit/1ms")
    return networks


@dataclass
class Finished:
    """Result of a run."""

    run: Any
    status: str
    error: str | None = None  # its last line, or the reason for which the run was cut
    seconds: float = 0.0  # that it took, when it was run
    kept: bool = False  # its files existed before
    words: list[str] = field(default_factory=list)  # after ``mpicomp``, without files
    outcome: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A command and the files that it writes."""

    name: str  # start of the names of its files
    command: Callable[[], tuple[list[str], dict[str, str]]]  # words without options for files, and added environment
    files: Mapping[str, str]  # by option, how the name of the file ends
    mark: Mapping[str, Any]  # files count as complete as long as this, which JSON does not change, is the same


class Folder:
    """Runs jobs and keeps their files: what they write, ``.log`` with what they print, and ``.done``, written last."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()  # jobs may run elsewhere

    def path(self, name: str, kind: str) -> Path:
        return self._path / f"{name}.{kind}"

    def run(
        self, job: Job, finished: Finished, is_complete: Callable[[], bool], left_s: float, expected_s: float
    ) -> None:
        """Fill ``finished`` by complete files, or by a run of at most ``left_s`` seconds unless it takes longer."""
        done, log = self.path(job.name, "done"), self.path(job.name, "log")
        before = read_json(done)
        if {name: before.get(name) for name in job.mark} == job.mark and is_complete():
            finished.status, finished.seconds, finished.kept = DONE, float(before["seconds"]), True
            return
        if left_s <= max(0.0, expected_s):
            finished.status, finished.error = CUT, "not run: the time was over"
            return
        written = {option: self.path(job.name, kind) for option, kind in job.files.items()}
        for path in (done, log, *written.values()):
            path.unlink(missing_ok=True)
        files = [word for option, path in written.items() for word in (option, str(path))]
        command, variables = job.command()
        begin = time.monotonic()
        status = execute([*command, *files], {**os.environ, **variables}, log, min(left_s, _LONGEST_S))
        finished.seconds = time.monotonic() - begin
        if status is None:
            late = f"no end after {_LONGEST_S:.0f} s"
            finished.status, finished.error = (CUT, _OVER) if left_s < _LONGEST_S else (FAILED, late)
        elif status != 0:
            finished.status, finished.error = FAILED, last_words(log) or f"status {status}, and nothing was said"
        elif not is_complete():
            finished.status, finished.error = FAILED, "its files are not complete, though it ended well"
        else:
            finished.status = DONE
            new = done.with_suffix(".new")
            new.write_text(json.dumps({**job.mark, "seconds": finished.seconds}) + "\n")
            new.replace(done)


def on_one_host(ranks: int, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs ``mpicomp`` with words as so many ranks here, and what its environment has added."""
    launcher = find_launcher()
    start, more = [str(launcher), "-n", str(ranks)], {}
    if find_mpi(launcher) == "openmpi":
        start.append("--oversubscribe")
        more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        more["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if "OMP_NUM_THREADS" not in os.environ:  # as many as in a lab: sums are then the same
        more["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return [*start, *MPICOMP, *words], more


def execute(command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float) -> int | None:
    """Run a command to its end with its output in a file; return its status, None where the time was over."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.terminate()  # where it has not ended, its time is over or this process was interrupted
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def last_words(log: Path) -> str:
    """Return the last line of an error in what a job has printed; launchers add lines after it."""
    if not log.exists():
        return ""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("mpicomp: ", "lab: ")) or _is_error(line)]
    return (errors or lines or [""])[-1]


def _is_error(line: str) -> bool:
    """Return whether it is the last line of a traceback."""
    name = line.partition(":")[0]
    return name.replace(".", "").replace("_", "").isalnum() and name.endswith("Error")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where there is none, or half of one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines that ``train --metrics`` wrote; an empty list where there are others, or half of one."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, RecursionError, ValueError):
        return []
    return lines if all(isinstance(line, dict) for line in lines) else []


# Labs


def check_lab(study: str) -> None:
    """Refuse to begin where no lab can be built on this machine."""
    try:
        check_requirements()
        find_launcher()
    except LabError as error:
        raise ConfigurationError(f"{study}: a lab {error}") from None


def lab_words(hosts: int, network: Network, more: Sequence[str] = ()) -> list[str]:
    """Return the words that run what follows in a lab with one rank on each host."""
    links = ["--hosts", str(hosts), "--bandwidth", network.bandwidth, "--latency", network.latency]
    return [*MPICOMP, "lab", "run", *links, *more, "--"]


def run_in_lab(
    hosts: int,
    network: Network,
    words: Sequence[str],
    lab: Sequence[str] = (),
    watch: Callable[[str], None] = print,
    program: Sequence[str] = MPICOMP,
) -> None:
    """Run a program in a lab to its end; ``watch`` gets each line of its output, an error the last ones."""
    process = subprocess.Popen(
        [*lab_words(hosts, network, lab), *program, *words],
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
