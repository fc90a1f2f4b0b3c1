"""``mpicomp bench policies``: seconds to the quality of dense with every policy, on emulated networks."""

import argparse
import contextlib
import importlib.util
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpicomp.bench.networks import Network
    from mpicomp.bench.policies import Run
    from mpicomp.bench.policy_runs import Finished, Runner

HELP = "compare policies by the time to equal quality, on emulated networks (needs root)"

_COMMAND = "bench policies"
_MINUTES, _QUICK_MINUTES = 120.0, 45.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Train with every policy until the quality of dense exchange is reached, and show for every task and network "
        "the seconds that takes, with bytes and qualities: mean and deviation over seeds. Policies that do not look at "
        "the network are trained on one host, the others in a lab for each network; there the steps of all are timed "
        "in turn. Without options it takes two hours, with --quick 45 minutes."
    )
    parser.add_argument("--quick", action="store_true", help="one seed, two networks, 45 minutes")
    parser.add_argument(
        "--policies",
        metavar="P[,..]",
        help="dense, which is run in any case, static, schedule, gravac, accordion, lgreco, flexible, auto (all)",
    )
    parser.add_argument("--tasks", default="digits,text-lstm", metavar="T[,..]", help="what is trained (%(default)s)")
    parser.add_argument(
        "--networks",
        metavar="B/L[,..]",
        help="bandwidth and latency of each lab's links (50mbit/1ms,200mbit/1ms,1gbit/0us,2.5gbit/0us)",
    )
    parser.add_argument("--seeds", metavar="K[,..]", help="of models and batches (0,1,2; digits: 0,1,2,3,4)")
    parser.add_argument("--steps", type=int, metavar="S", help="of each training (what the task is tuned for)")
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="of each lab (%(default)s)")
    parser.add_argument("--limit", type=float, metavar="M", help="minutes; what has no time left is cut (120)")
    parser.add_argument(
        "--keep",
        metavar="FOLDER",
        help="keep the files of all runs; with the same folder and options again it goes on where it stopped",
    )
    parser.add_argument("--json", metavar="F", help="write rows and runs to F as one JSON object, after every run")
    parser.set_defaults(alone=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the trainings one after the other, and print a table for each task and network; 1 where one failed."""
    from mpicomp.bench.networks import Network, check_lab
    from mpicomp.bench.policies import ARMS, DENSE, GOALS, NETWORKS, QUICK_NETWORKS, runs_of
    from mpicomp.bench.policy_runs import Runner
    from mpicomp.cli.options import check_least, check_writable, read_list
    from mpicomp.errors import ConfigurationError

    policies = _names("--policies", ",".join(ARMS) if arguments.policies is None else arguments.policies, list(ARMS))
    policies = [DENSE, *(name for name in policies if name != DENSE)]  # the target is its quality
    tasks = _names("--tasks", arguments.tasks, list(GOALS))
    default = ",".join(QUICK_NETWORKS if arguments.quick else NETWORKS)
    words = read_list(default if arguments.networks is None else arguments.networks)
    networks = list(dict.fromkeys(Network.read(word) for word in words))
    if not networks:
        raise ConfigurationError(f"{_COMMAND}: --networks names nothing; write for example 50mbit/1ms")
    asked = _seeds("0" if arguments.quick and arguments.seeds is None else arguments.seeds)
    seeds = {task: asked or list(GOALS[task].seeds) for task in tasks}
    check_least(_COMMAND, "--hosts", arguments.hosts, 2)
    if arguments.steps is not None:
        check_least(_COMMAND, "--steps", arguments.steps)
    limit = arguments.limit
    if limit is None:
        limit = _QUICK_MINUTES if arguments.quick else _MINUTES
    if not 0 < limit < float("inf"):
        raise ConfigurationError(f"{_COMMAND}: --limit must be minutes above 0, got {limit}")
    if arguments.json is not None:
        check_writable(_COMMAND, arguments.json)
    if arguments.keep is not None:
        if "," in str(Path(arguments.keep).resolve()):
            raise ConfigurationError(f"{_COMMAND}: --keep must be a folder without commas, got '{arguments.keep}'")
        with contextlib.suppress(OSError):
            Path(arguments.keep).mkdir(parents=True, exist_ok=True)
        check_writable(_COMMAND, str(Path(arguments.keep) / "files"))
    check_lab(_COMMAND)
    _check_tasks()

    with contextlib.ExitStack() as stack:
        folder = arguments.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="mpicomp-bench-"))
        runner = Runner(Path(folder), arguments.hosts, arguments.steps)
        _run_all(runner, runs_of(policies, networks, seeds), networks, 60 * limit, arguments)
    return _show(runner, networks, arguments.hosts)


def _names(option: str, text: str, known: list[str]) -> list[str]:
    """Read names with commas between them."""
    from mpicomp.cli.options import read_list
    from mpicomp.errors import ConfigurationError, UnknownNameError

    names = list(dict.fromkeys(read_list(text)))
    for name in names:
        if name not in known:
            raise UnknownNameError(f"{_COMMAND}: {option}", name, known)
    if not names:
        raise ConfigurationError(f"{_COMMAND}: {option} names nothing; write for example {known[0]}")
    return names


def _seeds(text: str | None) -> list[int]:
    """Read seeds with commas between them; none where none are named."""
    from mpicomp.cli.options import check_least
    from mpicomp.errors import ConfigurationError

    if text is None:
        return []
    try:
        seeds = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"{_COMMAND}: --seeds must be whole numbers such as 0,1,2, got {text!r}") from None
    return sorted({check_least(_COMMAND, "--seeds", seed, 0) for seed in seeds})


def _check_tasks() -> None:
    """Say in time that the tasks cannot be trained here."""
    from mpicomp.errors import ConfigurationError

    missing = [name for name in ("torch", "sklearn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{_COMMAND}: trains tasks, and there is no {' and no '.join(missing)}; "
            "install what it needs with pip install 'mpicomp[torch,bench]'"
        )


def _run_all(
    runner: "Runner", runs: "list[Run]", networks: "list[Network]", limit_s: float, arguments: argparse.Namespace
) -> None:
    """Run everything, with a line for each run."""
    begin = time.monotonic()
    print(f"{_COMMAND}: {len(runs)} runs, {arguments.hosts} hosts, at most {limit_s / 60:.0f} minutes", flush=True)
    for place, own in enumerate(runs, 1):
        finished = runner.run(own, limit_s - (time.monotonic() - begin))
        passed = time.monotonic() - begin
        left = sum(runner.expected_s(other) for other in runs[place:])
        rest = f"{len(runs) - place} left, about {min(left, max(0.0, limit_s - passed)) / 60:.0f} minutes"
        print(f"{passed:6.0f} s  {place}/{len(runs)}  {own}: {_came_to(finished)}; {rest}", flush=True)
        if arguments.json is not None:
            _write(arguments.json, runner, networks, arguments.hosts)


def _came_to(finished: "Finished") -> str:
    """Say in a few words what became of a run."""
    if finished.error is not None:
        return f"{finished.status}: {finished.error}"
    how = "there already" if finished.kept else f"{finished.seconds:.0f} s"
    if finished.timed:
        return f"{how}; s a step: " + ", ".join(f"{name} {row['median_s']:.4g}" for name, row in finished.timed.items())
    return f"{how}, {float(finished.outcome['median_step_s']):.4g} s a step, quality {finished.quality:.4f}"


def _write(path: str, runner: "Runner", networks: "list[Network]", hosts: int) -> None:
    """Write what there is so far."""
    from mpicomp.bench import rows
    from mpicomp.bench.policy_table import rows_of, told_of

    finished = runner.finished
    written: dict[str, Any] = {
        "schema": rows.SCHEMA,
        "environment": rows.environment(1, "cpu"),
        "rows": rows_of(finished, networks, hosts),
        "runs": [told_of(own, finished) for own in finished.values()],
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(written, file, indent=1)
        file.write("\n")


def _show(runner: "Runner", networks: "list[Network]", hosts: int) -> int:
    """Print the tables and what they mean; give the exit status."""
    from mpicomp.bench import rows
    from mpicomp.bench.policies import GOALS
    from mpicomp.bench.policy_runs import FAILED
    from mpicomp.bench.policy_table import COLUMNS, cells_of, explained, rows_of

    found = rows_of(runner.finished, networks, hosts)
    for task, bandwidth, latency in dict.fromkeys((row["task"], row["bandwidth"], row["latency"]) for row in found):
        own = [row for row in found if (row["task"], row["bandwidth"], row["latency"]) == (task, bandwidth, latency)]
        better = "lower" if GOALS[task].lower else "higher"
        print(f"\n{task}, {hosts} hosts, {bandwidth}, {latency}; quality: {better} is better")
        rows.show([cells_of(row) for row in own], COLUMNS)
    print("\n" + "\n".join(explained(found, runner.finished)))
    return int(any(own.status == FAILED for own in runner.finished.values()))
