"""``auto`` against the best fixed plan in hindsight, on emulated networks: ``python studies/hindsight.py``."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import comparison
from comparison import DENSE, Training
from hindsight_table import AUTO, WHOLE, Table
from mpicomp.bench.measure import networks
from mpicomp.bench.measure.jobs import FAILED
from mpicomp.bench.measure.networks import Network
from policy_runs import GOALS, NETWORKS, PLANS, Run, Runner, Timing

from mpicomp.cli import run_program
from mpicomp.cli.options import check_least

_STUDY = "hindsight"
_MINUTES = 300.0  # limit of the whole study
_TASKS = "digits,digits-shards,text-lstm,text-gpt"
_CHOOSE, _TEST = "0,1,2", "3,4,5"
_MANY = {"digits": 10, "digits-shards": 10}
"""Seeds that are tested of tasks whose trainings are short."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="studies/hindsight.py",
        description="Train with every fixed plan, and choose for each task and network the one that comes soonest to "
        "the quality of dense exchange. Then train it with other seeds, and auto with them in a lab of each network. "
        "It needs root, and hours.",
    )
    parser.add_argument("--plans", metavar="P[,..]", help=f"fixed plans ({','.join(PLANS)})")
    parser.add_argument(
        "--networks", default=",".join(NETWORKS), metavar="B/L[,..]", help="of each lab's links (%(default)s)"
    )
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="of each lab (%(default)s)")
    parser.add_argument("--choose", default=_CHOOSE, metavar="K[,..]", help="seeds that choose (%(default)s)")
    comparison.add_arguments(parser, _MINUTES)
    parser.set_defaults(tasks=_TASKS)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the trainings one after the other, and print a row for each task and network; 1 where one failed."""
    plans = comparison.read_arms(_STUDY, "--plans", arguments.plans, list(PLANS))
    plans = list(dict.fromkeys([*WHOLE, *plans]))
    choose = comparison.read_seeds(_STUDY, arguments.tasks, arguments.choose, GOALS, "--choose")
    test = comparison.read_seeds(_STUDY, arguments.tasks, arguments.seeds or _TEST, GOALS)
    if arguments.seeds is None:
        test = {task: list(range(own[0], own[0] + _MANY.get(task, len(own)))) for task, own in test.items()}
    links = networks.read(_STUDY, arguments.networks)
    hosts = check_least(_STUDY, "--hosts", arguments.hosts, 2)
    comparison.check(_STUDY, arguments)
    networks.check_lab(_STUDY)
    comparison.check_tasks(_STUDY)

    minutes = arguments.limit or _MINUTES
    end = time.monotonic() + 60 * minutes
    with comparison.folder_of(arguments) as folder, comparison.terminated():
        runner = Runner(Path(folder), hosts, arguments.steps)
        table = Table(runner.finished, links, hosts, choose, test)
        print(f"{_STUDY}: {hosts} hosts, at most {minutes:.0f} minutes", flush=True)
        # A stage of every task after the other: what has no time left in the end are the last seeds.
        stages = [_stages(task, plans, links, table) for task in choose]
        while stages:
            for own in list(stages):
                stage = next(own, None)
                if stage is None:
                    stages.remove(own)
                else:
                    comparison.run_each(stage, runner, table, end, arguments.json)
        comparison.show(table, runner)
        return int(any(own.status == FAILED for own in runner.finished.values()))


def _stages(task: str, plans: Sequence[str], links: Sequence[Network], table: Table) -> Iterator[list[Run]]:
    """Yield what is run of a task, each stage by what those before it came to."""
    first, *others = table.choose[task]
    yield [Training(task, plan, first) for plan in plans]
    reached = tuple(plan for plan in plans if plan == DENSE or table.reaches(task, plan, first))
    yield [Timing(task, reached, first, network) for network in links]
    near = [plan for plan in plans if plan == DENSE or table.is_near(task, plan)]
    yield [Training(task, plan, seed) for seed in others for plan in near]
    chosen = {network: table.chosen(task, network) for network in links}
    fixed = dict.fromkeys([*WHOLE, *(plan for plan in chosen.values() if plan is not None)])
    for seed in table.test[task]:
        stage: list[Run] = [Training(task, plan, seed) for plan in fixed]
        for network, plan in chosen.items():
            stage.append(Training(task, AUTO, seed, network))
            if seed == table.test[task][0]:
                arms = dict.fromkeys([*WHOLE, *([] if plan is None else [plan]), AUTO])
                stage.append(Timing(task, tuple(arms), seed, network))
        yield stage


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
