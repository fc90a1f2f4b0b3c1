"""``mpicomp train``: a real model on real data, its gradients exchanged through mpicomp."""

import argparse
import contextlib
import json
import math
import os
import tempfile
from typing import TYPE_CHECKING, Any

from mpicomp.cli.options import add_device, add_plugin, add_task, load_task, start_training, write_json, writes_files

if TYPE_CHECKING:
    from mpicomp.bench.tasks import Task
    from mpicomp.bench.train import Settings, Trained

    from mpicomp.compressors import Compressor
    from mpicomp.mpi import Transport
    from mpicomp.policies import Policy

HELP = "train a real model on real data with compressed exchange, and tell whether it paid"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_plugin(parser)
    add_task(parser)
    parser.add_argument("--compressor", help="a name from `mpicomp list`, or its configuration as JSON")
    parser.add_argument("--ratio", type=float, help="kept fraction in (0, 1], where the compressor has one (0.01)")
    parser.add_argument("--collective", default="auto", help="a name from `mpicomp list`, or auto (default)")
    parser.add_argument(
        "--policy",
        help="a name from `mpicomp list`, or its configuration as JSON (default: static where a compressor is named, "
        "auto where none is); with --compressor it chooses among that one's settings and dense",
    )
    parser.add_argument(
        "--exchange",
        default="gradients",
        help="gradients (default), or updates: ranks step by themselves and exchange the changes; as JSON "
        """with settings of UpdateOptimizer, such as '{"id": "updates", "outer": {"lr": 0.7, "momentum": 0.9}}'; """
        "muon: ranks step by Muon and AdamW, and exchange changes in one bit an element every 10 steps",
    )
    parser.add_argument(
        "--shard",
        type=int,
        default=1,
        metavar="N",
        help="shard the model over N ranks by PyTorch's fully_shard (FSDP2), those of a host first, and exchange "
        "between the replicas of N ranks (1)",
    )
    parser.add_argument(
        "--on-failure",
        choices=("abort", "shrink"),
        default="abort",
        help="when a rank dies: the job ends, or the others go on (Open MPI's mpiexec --with-ft ulfm) (%(default)s)",
    )
    parser.add_argument("--every", metavar="H", help="steps from one exchange of updates to the next, or 'auto' (1)")
    parser.add_argument(
        "--lr-scale", type=float, default=1.0, metavar="X", help="times the rate that the task is tuned for (1)"
    )
    parser.add_argument(
        "--warmup",
        metavar="N|ramp:N",
        help="dense steps that come first, or steps of DGC's ramp, whose ratios fall from 0.25 to the compressor's "
        "(default: 20, and at most half of all steps, with a compressor and neither a collective nor a policy; else 0)",
    )
    parser.add_argument("--steps", type=int, help="number of steps (default: that for which the task is tuned)")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the batches and the schemes (0)")
    parser.add_argument("--data", metavar="PATH", help="your own text (text-gpt, text-lstm) or npz (digits)")
    parser.add_argument(
        "--evaluate-every", type=int, default=0, metavar="N", help="look at held-out data every N steps, too (0)"
    )
    parser.add_argument(
        "--checkpoints",
        metavar="FOLDER",
        help="go on from the newest checkpoint below FOLDER, on any number of ranks, and write new ones; SIGTERM and "
        "SIGUSR1 then end training after a step, with a checkpoint and exit status 75",
    )
    parser.add_argument(
        "--checkpoint-every", type=int, default=100, metavar="N", help="steps from one to the next (%(default)s)"
    )
    parser.add_argument(
        "--against-dense",
        action="store_true",
        help="train once more with dense exchange, from the same seed; the verdict then counts quality, and the report "
        "shows both",
    )
    parser.add_argument(
        "--no-verdict",
        action="store_true",
        help="leave out the exchanges that are measured after the training, dense ones among them",
    )
    add_device(parser, "where the model is")
    parser.add_argument("--json", metavar="F", help="write the outcome to F as one JSON object")
    parser.add_argument("--metrics", metavar="F", help="write a JSON line a step to F")
    parser.add_argument("--report", metavar="F.html", help="write the run's report to F.html, as `mpicomp report` does")
    parser.add_argument(
        "--trace",
        metavar="F",
        help="write a timeline of all ranks to F, on one clock, for ui.perfetto.dev or chrome://tracing",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, and print a verdict on rank 0."""
    from mpicomp.cli.options import check_drawing, check_folder, check_writable
    from mpicomp.errors import ConfigurationError
    from mpicomp.job import plural
    from mpicomp.job.stop import stop_on_signals

    if arguments.checkpoints is not None:
        stop_on_signals()  # first: the imports below take seconds
    compressor = _check(arguments)
    updates = _updates(arguments)
    policy = _policy(arguments, compressor, updates is not None and updates["sync_every"] == "auto")
    warmup = _warmup(arguments, compressor, updates)
    check_writable("train", arguments.json, arguments.metrics, arguments.report, arguments.trace)
    if writes_files():
        if arguments.checkpoints is not None:
            check_folder("train", arguments.checkpoints)
        if arguments.report is not None:
            check_drawing("train")
    transport, task, device = start_training("train", arguments, arguments.data)
    from mpicomp.bench.train import Checkpoints, Settings

    shard, ranks = arguments.shard, transport.group.size
    if ranks % shard or ranks == shard > 1:
        raise ConfigurationError(
            f"train: --shard {shard} needs at least two replicas of {shard} ranks, and this job has "
            f"{plural(ranks, 'rank')}; start it with mpiexec -n {2 * shard}"
        )
    steps = arguments.steps or task.steps
    checkpoints = None
    if arguments.checkpoints is not None:
        same = {
            "seed": arguments.seed,
            "compressor": None if compressor is None else compressor.get_config(),
            "collective": arguments.collective,
            "policy": policy.get_config(),
            "exchange": "gradients" if updates is None else updates,
            "lr-scale": arguments.lr_scale,
        }
        checkpoints = Checkpoints(arguments.checkpoints, arguments.checkpoint_every, same)
    settings = Settings(
        compressor,
        arguments.collective,
        policy,
        steps,
        arguments.seed,
        evaluate_every=arguments.evaluate_every,
        probes=not arguments.no_verdict,
        warmup=_fitted(warmup, arguments, updates, steps),
        updates=updates,
        lr_scale=arguments.lr_scale,
        on_failure=arguments.on_failure,
        checkpoints=checkpoints,
        trace=arguments.trace,
        shard=shard,
    )
    return _train(arguments, settings, transport, task, device)


def _train(
    arguments: argparse.Namespace, settings: "Settings", transport: "Transport", task: "Task", device: Any
) -> int:
    from mpicomp.bench.measure.metrics import MetricsWriter
    from mpicomp.bench.measure.progress import Progress
    from mpicomp.bench.train import Stopped, train_measured

    from mpicomp.errors import FileWriteError
    from mpicomp.job.stop import STOPPED
    from mpicomp.reducer.agreement import agree, run_collectively

    group = transport.group
    first = group.rank == 0
    if first:
        print(_heading(settings, task.name, group.size), flush=True)
    with contextlib.ExitStack() as stack:
        lines, dense_lines = arguments.metrics, None
        if first and arguments.report is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            lines, dense_lines = lines or os.path.join(folder, "run.jsonl"), os.path.join(folder, "dense.jsonl")
        writer = run_collectively(lambda: MetricsWriter(lines if first else None), transport, "train")
        with writer as metrics:
            trained = train_measured(task, settings, transport, Progress(first), metrics, device)
        problem = metrics.problem
        dense = None
        if arguments.against_dense and not isinstance(trained, Stopped):
            if first:
                print("the same with dense exchange:", flush=True)
            task = load_task("train", arguments, arguments.data, group)
            with MetricsWriter(dense_lines) as metrics:
                ended = train_measured(task, _dense(settings), transport, Progress(first), metrics, device)
            problem = problem or metrics.problem
            assert not isinstance(ended, Stopped)  # signals stop only a training with checkpoints
            dense = ended, dense_lines
        if transport.group.rank == 0:  # of the surviving ranks
            try:
                if isinstance(trained, Stopped):
                    print(
                        f"stopped after step {trained.step} of {settings.steps}: a checkpoint is in "
                        f"'{arguments.checkpoints}', and the same command continues from it (exit status {STOPPED})",
                        flush=True,
                    )
                else:
                    _report(trained, arguments, lines if first else None, dense)
            except FileWriteError as error:
                problem = problem or error
        transport.run(agree(None, problem, transport.group, "train"))
        transport.close()
    return STOPPED if isinstance(trained, Stopped) else 0


def _check(arguments: argparse.Namespace) -> "Compressor | None":
    from mpicomp.bench.training import MUON, MUON_COMPRESSOR, MUON_UPDATES

    from mpicomp.cli.options import read_configuration
    from mpicomp.compressors import Dense, get_compressor
    from mpicomp.errors import ConfigurationError
    from mpicomp.setting_checks import check_least, check_ratio

    if arguments.steps is not None:
        check_least("train", "--steps", arguments.steps)
    check_least("train", "--evaluate-every", arguments.evaluate_every, 0)
    check_least("train", "--checkpoint-every", arguments.checkpoint_every)
    check_least("train", "--shard", arguments.shard)
    if arguments.shard > 1 and arguments.checkpoints is not None:
        raise ConfigurationError(
            f"train: --checkpoints needs the whole model on each rank, and --shard {arguments.shard} cuts it; leave "
            "one of them out; docs/pytorch.md shows how a script of yours saves shards"
        )
    if not 0 < arguments.lr_scale < math.inf:
        raise ConfigurationError(f"train: --lr-scale must be a number above 0, got {arguments.lr_scale}")
    if arguments.exchange == MUON:
        arguments.exchange = json.dumps({"id": "updates"} | MUON_UPDATES)
        arguments.compressor = arguments.compressor or json.dumps(MUON_COMPRESSOR)
    ratio = 0.01 if arguments.ratio is None else check_ratio("train", arguments.ratio)
    compressor = None
    if arguments.compressor is not None:
        compressor = get_compressor(read_configuration("train", arguments.compressor, ratio))
    twice = {
        "--compressor dense": compressor == Dense(),
        "--checkpoints": arguments.checkpoints is not None,
        "--on-failure shrink": arguments.on_failure != "abort",
    }
    if arguments.against_dense and any(twice.values()):
        option = next(option for option, is_set in twice.items() if is_set)
        raise ConfigurationError(f"train: --against-dense trains twice, which {option} does not go with; drop one")
    return compressor


def _warmup(
    arguments: argparse.Namespace, compressor: "Compressor | None", updates: dict[str, Any] | None
) -> int | str:
    from mpicomp.policies.schedule import choose_warmup

    outer = None if updates is None else updates.get("outer")
    has_signs = isinstance(outer, dict) and outer.get("sign")  # those of a dense mean are another method
    if arguments.warmup is None and (has_signs or (updates or {}).get("inner") == "muon"):
        return 0
    return choose_warmup(arguments.warmup, compressor, arguments.collective, arguments.policy)


def _fitted(warmup: int | str, arguments: argparse.Namespace, updates: dict[str, Any] | None, steps: int) -> int | str:
    from mpicomp.errors import ConfigurationError
    from mpicomp.policies.schedule import read_warmup

    every = 1 if updates is None or updates["sync_every"] == "auto" else updates["sync_every"]
    if arguments.warmup is None:
        return min(int(warmup), steps // every // 2)  # so that a short run shows the named compressor, too
    if every * read_warmup(warmup)[0] >= steps:
        raise ConfigurationError(
            f"train: --warmup {arguments.warmup} takes all {steps // every} "
            f"{'steps' if updates is None else 'exchanges'}; give it fewer, or name more --steps"
        )
    return warmup


def _heading(settings: "Settings", task: str, ranks: int) -> str:
    parts = "chosen by mpicomp" if settings.compressor is None else repr(settings.compressor)
    parts += f", warmup {settings.warmup}" if settings.warmup else ""
    if settings.updates is not None:
        every = settings.updates["sync_every"]
        interval = " after a number of steps that is chosen" if every == "auto" else f" every {every} steps"
        parts += ", updates" + (interval if every != 1 else "")
    replicas = f" in replicas of {settings.shard}" if settings.shard > 1 else ""
    return f"{task}: {settings.steps} steps on {ranks} ranks{replicas}, policy {settings.policy.id}, compressor {parts}"


def _dense(settings: "Settings") -> "Settings":
    from dataclasses import replace

    from mpicomp.compressors import Dense
    from mpicomp.policies import get_policy

    words: dict[str, Any] = {"compressor": Dense(), "collective": "auto", "policy": get_policy("static"), "warmup": 0}
    words |= {"updates": None, "lr_scale": 1.0}
    return replace(settings, **words, probes=False, trace=None)


def _report(
    trained: "Trained", arguments: argparse.Namespace, lines: str | None, dense: "tuple[Trained, str | None] | None"
) -> None:
    import msgspec
    from mpicomp.bench.train import judge, table

    run = trained.run
    run.verdict = judge(trained, None if dense is None else dense[0].run)
    print(table(trained))
    print(f"verdict: {run.verdict}", flush=True)
    if arguments.json is not None:
        write_json(arguments.json, msgspec.structs.asdict(run))
    if arguments.report is not None:
        from mpicomp.bench.report.runs import Run, read_lines
        from mpicomp.bench.report.write import draw_report, plan_name

        runs = [Run(plan_name(run), run, read_lines(lines) if lines else [])]
        if dense is not None:
            dense[0].run.verdict = judge(dense[0])
            runs.append(Run("dense", dense[0].run, read_lines(dense[1]) if dense[1] else []))
        draw_report(runs, arguments.report)


def _updates(arguments: argparse.Namespace) -> dict[str, Any] | None:
    from mpicomp.cli.options import read_named
    from mpicomp.errors import ConfigurationError, UnknownNameError
    from mpicomp.setting_checks import check_least

    config = read_named("train", "--exchange", arguments.exchange)
    name = config.pop("id", None)
    if name not in ("gradients", "updates"):
        raise UnknownNameError("train: --exchange", str(name), ["gradients", "updates", "muon"])
    if name == "gradients":
        if config or arguments.every is not None:
            setting = f"'{next(iter(config))}'" if config else "--every"
            raise ConfigurationError(
                f"train: gradients are exchanged in every step, so {setting} has no effect; name --exchange updates"
            )
        return None
    known = ("sync_every", "outer", "feedback_decay", "inner")
    unknown = sorted(set(config) - set(known))
    if unknown:
        raise ConfigurationError(
            f"train: --exchange: updates have no setting '{unknown[0]}'; known: {', '.join(known)}"
        )
    if config.get("inner", "muon") != "muon":
        raise UnknownNameError("train: --exchange: inner", str(config["inner"]), ["muon"])
    every = config.pop("sync_every", 1) if arguments.every is None else arguments.every
    if every != "auto":
        try:
            every = int(every)
        except ValueError:
            raise ConfigurationError(f"train: --every must be a number of steps or 'auto', got '{every}'") from None
        check_least("train", "--every", every)
    return {"sync_every": every, **config}


def _policy(arguments: argparse.Namespace, compressor: "Compressor | None", chooses_steps: bool) -> "Policy":
    from mpicomp.cli.options import read_named
    from mpicomp.policies import UserSettings, get_policy
    from mpicomp.policies.schedule import WarmUp, read_warmup

    default = "interval" if chooses_steps else "auto" if compressor is None else "static"
    config = read_named("train", "--policy", arguments.policy or default)
    policy = get_policy(config)
    if arguments.warmup is not None and read_warmup(arguments.warmup)[0]:
        policy = WarmUp(policy, arguments.warmup)
    policy.configure(UserSettings(compressor, arguments.collective))
    return get_policy(config)  # one object serves one reducer
