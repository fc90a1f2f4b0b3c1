"""A network that changes in mid-run, and how soon ``auto`` runs what is best then: ``python studies/change.py``."""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lab_jobs import Network, check_lab, rows_in_lab, run_in_lab
from mpicomp.bench.measure.exchanges import Plan, Residuals, Runner
from mpicomp.bench.measure.feedback import Gradients
from mpicomp.bench.measure.timings import gather

from mpicomp.cli import run_program
from mpicomp.cli.options import check_writable, read_compressors, read_list, read_numels, read_ratios
from mpicomp.compressors import Compressor
from mpicomp.errors import ConfigurationError
from mpicomp.policies.plan_selector import collectives_for
from mpicomp.rounds import Group
from mpicomp.setting_checks import check_least
from mpicomp.system import launcher
from mpicomp.transport import Transport

_STUDY = "change"
_BEFORE = 10  # steps before the change whose median is compared
_AFTER = 5  # steps after it
_CHANGED = 1.5  # times longer or shorter: the network has changed
_WINDOW_S = 5.0  # before and after a change is due: the lab's clock began with the launcher, this one with the steps
_AS_GOOD = 1.05  # times the best plan's median: measuring cannot separate them
_CLOSE = (5, 15)  # steps before and after a change that are shown one by one
_STEPS_OF_LINE = 200  # steps that are shown in one line elsewhere


@dataclass(frozen=True)
class Step:
    """One step of ``auto``."""

    at_s: float  # when it began, since rank 0 began with the steps
    seconds: float  # of the slowest rank
    plan: str


@dataclass(frozen=True)
class Phase:
    """The steps after a change of the network, or after the start, and the plans that they ran."""

    bandwidth: str
    first: int | None  # the first step that showed it
    best: str  # fixed plan
    as_good: tuple[str, ...]  # plans within 5 % of it, itself among them
    steps: int | None  # after which one of these was run first
    share: float  # of the steps of the phase's second half that ran one of these
    mostly: str | None  # the plan that most steps of that half ran


def run_steps(compressor: Compressor, numel: int, seconds: float, transport: Transport) -> list[Step]:
    """Run ``auto`` step after step for so many seconds. Collective; the same on all ranks but for ``at_s``."""
    begin = time.monotonic()
    gradients = Gradients(numel, seed=transport.group.rank)
    runner = Runner(Plan(compressor, "auto"), gradients, transport, Residuals(transport.group.rank), None)
    times: list[float] = []
    while gather(np.array([at_s := time.monotonic() - begin]), transport).max() < seconds:
        times.append(at_s)
        runner.step()
    runner.catch_up()
    runner.close()
    return [Step(*step) for step in zip(times, runner.slowest(), runner.ran, strict=True)]


def seen_at(steps: Sequence[Step], due_s: float) -> int | None:
    """Return the first step that shows a change of the network that is due at a time; None where none does.

    It takes longer or shorter than the steps before it, and so do those after it: whatever else the machine does
    hardly lasts that long.

    >>> steps = [Step(at / 10, 0.1 if at < 50 else 0.3, "dense ring") for at in range(100)]
    >>> seen_at(steps, 5.5)
    50
    >>> seen_at(steps[:40], 5.5) is None
    True
    """
    for place in range(_BEFORE, len(steps) - _AFTER + 1):
        if abs(steps[place].at_s - due_s) > _WINDOW_S:
            continue
        before = float(np.median([step.seconds for step in steps[place - _BEFORE : place]]))
        after = float(np.median([step.seconds for step in steps[place : place + _AFTER]]))
        ratios = [steps[place].seconds / before, after / before]
        if min(ratios) > _CHANGED or max(ratios) < 1 / _CHANGED:
            return place
    return None


def phases_of(
    steps: Sequence[Step], bandwidths: Sequence[str], phase_s: float, fixed: Mapping[str, Mapping[str, float]]
) -> list[Phase]:
    """Return the phases of a run, ``phase_s`` each, with the steps until ``auto`` ran the best of ``fixed`` plans."""
    firsts = [0 if place == 0 else seen_at(steps, place * phase_s) for place in range(len(bandwidths))]
    phases = []
    for place, (bandwidth, first) in enumerate(zip(bandwidths, firsts, strict=True)):
        medians = fixed[bandwidth]
        best = min(medians, key=lambda name: medians[name])
        as_good = tuple(name for name in medians if medians[name] <= _AS_GOOD * medians[best])
        later = [other for other in firsts[place + 1 :] if other is not None]
        of_phase = [] if first is None else steps[first : later[0] if later else None]
        right = [step.plan in as_good for step in of_phase]
        half = right[len(right) // 2 :]
        ran = Counter(step.plan for step in of_phase[len(of_phase) // 2 :]).most_common(1)
        after = right.index(True) if True in right else None
        share_of_half = sum(half) / len(half) if half else 0.0
        phases.append(Phase(bandwidth, first, best, as_good, after, share_of_half, ran[0][0] if ran else None))
    return phases


def lines_of(steps: Sequence[Step], changes: Sequence[int]) -> Iterator[str]:
    """Show steps: one by one around the changes, many in a line elsewhere."""
    close = {step for change in changes for step in range(change - _CLOSE[0], change + _CLOSE[1])}
    start = 0
    while start < len(steps):
        stop = start + 1
        while start not in close and stop < len(steps) and stop - start < _STEPS_OF_LINE and stop not in close:
            stop += 1
        part, single = steps[start:stop], stop - start == 1
        counts = Counter(step.plan for step in part).most_common()
        ran = ", ".join(name if single else f"{name} ({times})" for name, times in counts)
        number = f"step {start}" if single else f"steps {start} to {stop - 1}"
        mark = "  <- the change is seen" if start in changes else ""
        median_ms = 1e3 * np.median([step.seconds for step in part])
        yield f"{part[0].at_s:8.3f} s  {number}: {median_ms:.4g} ms  {ran}{mark}"
        start = stop


def medians_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median seconds of every plan in rows of ``bench collectives``, by its name."""
    return {f"{row['compressor']} {row['collective']}": row["median_s"] for row in rows if row["median_s"] is not None}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="studies/change.py",
        description="Run auto step after step in a lab whose bandwidth changes, and show what it ran; then time the "
        "fixed plans that it may choose at each bandwidth, and show after how many steps auto ran the best. It needs "
        "root. Started with mpiexec or srun it makes no lab: it runs auto among these ranks for as long, while you "
        "change their network.",
    )
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="of the lab (%(default)s)")
    parser.add_argument(
        "--bandwidths", default="1gbit,50mbit,1gbit", metavar="B[,..]", help="one after the other (%(default)s)"
    )
    parser.add_argument("--latency", default="0us", metavar="L", help="of the links (%(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="of each bandwidth (%(default)s)")
    parser.add_argument("--numel", type=int, default=4_194_304, metavar="N", help="float32 elements (%(default)s)")
    parser.add_argument("--compressor", default="topk", metavar="A", help="a name or JSON (%(default)s)")
    parser.add_argument("--ratio", default="0.01", metavar="R", help="kept fraction (%(default)s)")
    parser.add_argument("--limit", type=float, default=1.5, metavar="S", help="of timing a fixed plan (%(default)s)")
    parser.add_argument("--json", metavar="F", help="write steps and phases to F as one JSON object")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the steps, or the labs that they are run in."""
    check_least(_STUDY, "--hosts", arguments.hosts)
    read_numels(_STUDY, str(arguments.numel))
    compressors = read_compressors(_STUDY, read_list(arguments.compressor), read_ratios(_STUDY, arguments.ratio))
    if len(compressors) != 1:
        raise ConfigurationError(f"{_STUDY}: --compressor and --ratio must give one plan's, got {len(compressors)}")
    if not 0 < arguments.seconds < float("inf"):
        raise ConfigurationError(f"{_STUDY}: --seconds must be a number above 0, got {arguments.seconds}")
    launch = launcher.detect()
    if arguments.json is not None and (launch is None or launch.rank == 0):
        check_writable(_STUDY, arguments.json)
    return (_in_labs if launch is None else _among_ranks)(arguments, compressors[0])


def _among_ranks(arguments: argparse.Namespace, compressor: Compressor) -> int:
    """Run auto among the ranks of this job."""
    from mpicomp.transport.mpi import MPITransport  # it loads MPI

    transport = MPITransport()
    seconds = arguments.seconds * len(arguments.bandwidths.split(","))
    steps = run_steps(compressor, arguments.numel, seconds, transport)
    if transport.group.rank == 0:
        if arguments.json is not None:
            Path(arguments.json).write_text(json.dumps({"schema": 1, "steps": [asdict(step) for step in steps]}) + "\n")
        print("\n".join(lines_of(steps, [])), flush=True)
    transport.close()
    return 0


def _in_labs(arguments: argparse.Namespace, compressor: Compressor) -> int:
    """Run auto in a lab that changes, then the fixed plans in labs that do not."""
    networks = [Network.read(f"{word}/{arguments.latency}") for word in arguments.bandwidths.split(",")]
    check_lab(_STUDY)
    options = ["--numel", str(arguments.numel), "--compressor", arguments.compressor, "--ratio", arguments.ratio]
    with tempfile.TemporaryDirectory(prefix="mpicomp-study-") as folder:
        schedule, path = Path(folder) / "schedule", Path(folder) / "steps.json"
        times = [arguments.seconds * place for place in range(len(networks))]
        lines = [f"{at_s} {network.bandwidth} {network.latency}" for at_s, network in zip(times, networks, strict=True)]
        schedule.write_text("\n".join(lines) + "\n")
        words = [*options, "--seconds", str(arguments.seconds), "--bandwidths", arguments.bandwidths]
        words += ["--json", str(path)]
        print(f"{_STUDY}: {arguments.hosts} hosts, {', then '.join(map(str, networks))}", flush=True)
        lab, program = ["--schedule", str(schedule)], [sys.executable, str(Path(__file__).resolve())]
        run_in_lab(arguments.hosts, networks[0], words, lab, lambda line: None, program)
        steps = [Step(**step) for step in json.loads(path.read_text())["steps"]]
    fixed = {}
    # Auto chooses among these and dense ones, which are timed in any case.
    names = ",".join(collectives_for(compressor, Group(0, arguments.hosts), complete=True))
    for network in dict.fromkeys(networks):
        words = [*options, "--limit", str(arguments.limit), "--collective", names]
        found, _ = rows_in_lab(arguments.hosts, network, words, lambda line: None)
        fixed[network.bandwidth] = medians_of(found)
    phases = phases_of(steps, [network.bandwidth for network in networks], arguments.seconds, fixed)
    print("\n".join(lines_of(steps, [phase.first for phase in phases[1:] if phase.first is not None])))
    print()
    for phase in phases:
        best_s = fixed[phase.bandwidth][phase.best]
        others = [name for name in phase.as_good if name != phase.best]
        near = f", as good: {', '.join(others)}" if others else ""
        print(f"{phase.bandwidth}: best is {phase.best} with {1e3 * best_s:.4g} ms{near}; ", end="")
        if phase.first is None:
            print("the change was not seen")
        else:
            assert phase.mostly is not None
            after = "never ran it" if phase.steps is None else f"ran it after {phase.steps} steps"
            print(f"seen at step {phase.first}, auto {after}, and in {phase.share:.0%} of the second half's")
            took = fixed[phase.bandwidth].get(phase.mostly)
            slower = "not timed" if took is None else f"{took / best_s - 1:+.1%} by its own timing"
            print(f"  mostly it ran {phase.mostly} there: {slower}")
    if arguments.json is not None:
        written: dict[str, Any] = {"schema": 1, "steps": [asdict(step) for step in steps]}
        written |= {"phases": [asdict(phase) for phase in phases], "fixed": fixed}
        Path(arguments.json).write_text(json.dumps(written) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
