"""``mpicomp train``: a real model on real data, its gradients exchanged through mpicomp."""

import argparse
import json

HELP = "train a real model on real data with compressed exchange, and say whether it paid"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--task", default="text-lstm", help="digits, text-lstm or vgg (default: text-lstm)")
    parser.add_argument("--compressor", help="a name from `mpicomp list`, or its configuration as JSON")
    parser.add_argument("--ratio", type=float, help="kept fraction in (0, 1], where the compressor has one (0.01)")
    parser.add_argument("--collective", default="auto", help="a name from `mpicomp list`, or auto (default)")
    parser.add_argument("--policy", help="static where a compressor is named, auto where none is")
    parser.add_argument("--steps", type=int, help="number of steps (default: what the task is tuned for)")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the batches and the schemes (0)")
    parser.add_argument("--data", metavar="PATH", help="your own text (text-lstm) or npz (digits, vgg)")
    parser.add_argument("--json", metavar="F", help="write the outcome to F as one JSON object")
    parser.add_argument("--metrics", metavar="F", help="write a JSON line a step to F")


def run(arguments: argparse.Namespace) -> int:
    """Train, and print a verdict on rank 0."""
    from mpicomp import launcher
    from mpicomp.cli.options import check_writable, read_configuration
    from mpicomp.compressors import get_compressor
    from mpicomp.compressors.base import check_ratio
    from mpicomp.errors import ConfigurationError

    ratio = 0.01 if arguments.ratio is None else check_ratio("train", arguments.ratio)
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigurationError(f"train: --steps must be at least 1, got {arguments.steps}")
    compressor = None
    if arguments.compressor is not None:
        compressor = get_compressor(read_configuration("train", arguments.compressor, ratio))
    launch = launcher.detect()
    if launch is None or launch.rank == 0:
        for path in filter(None, (arguments.json, arguments.metrics)):
            check_writable("train", path)
    policy = arguments.policy or ("static" if compressor is not None else "auto")
    # MPI starts before torch is loaded: Slurm's pmi2 cuts the longer messages that MPICH sends it afterwards.
    from mpicomp.transport.mpi import MPITransport

    transport = MPITransport()
    try:
        from mpicomp.bench.tasks import get_task
        from mpicomp.bench.train import Settings, train
        from mpicomp.bench.verdict import dense_step_s, exchange_s, judge, table

        task = get_task(arguments.task, arguments.seed, arguments.data)
    except ImportError as error:
        raise ConfigurationError(
            f"train: {error}; install what it needs with pip install 'mpicomp[torch,bench]'"
        ) from error
    except (ValueError, OSError) as error:
        raise ConfigurationError(str(error)) from error
    from mpicomp.bench.metrics import MetricsWriter
    from mpicomp.bench.progress import Progress

    group = transport.group
    first = group.rank == 0
    settings = Settings(compressor, arguments.collective, policy, arguments.steps or task.steps, arguments.seed)
    if first:
        what = "chosen by mpicomp" if compressor is None else repr(compressor)
        print(f"{task.name}: {settings.steps} steps on {group.size} ranks, compressor {what}", flush=True)
    with MetricsWriter(arguments.metrics if first else None) as metrics:
        outcome = train(task, settings, transport, Progress(first), metrics)
    transport.close()
    if not first:
        return 0
    verdict = judge(outcome)
    print(table(outcome, task.quality_name, settings.steps))
    print(f"verdict: {verdict}", flush=True)
    if arguments.json is not None:
        result = {
            "schema": 1,
            "task": task.name,
            "compressor": outcome.compressor.id,
            "compressor_config": outcome.compressor.get_config(),
            "ratio": getattr(outcome.compressor, "ratio", 1.0),
            "collective": outcome.collectives[0] if len(outcome.collectives) == 1 else arguments.collective,
            "policy": policy,
            "ranks": outcome.ranks,
            "hosts": outcome.hosts,
            "steps": settings.steps,
            "seed": settings.seed,
            "parameters": outcome.parameters,
            "quality": {"name": task.quality_name, "value": outcome.quality, "better": task.better},
            "median_step_s": outcome.median_step_s,
            "phases_s": outcome.phases_s,
            "exchange_s": exchange_s(outcome),
            "dense_exchange_s": outcome.dense_probe.seconds,
            "dense_collective": outcome.dense_probe.collective,
            "dense_step_s": dense_step_s(outcome),
            "gain": outcome.gain,
            "sent_bytes": outcome.sent_bytes,
            "wire_bytes": outcome.wire_bytes,
            "dense_wire_bytes": outcome.dense_wire_bytes,
            "dense_bytes": 4 * outcome.parameters * settings.steps,
            "once_bytes": outcome.once_bytes,
            "verdict": verdict,
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    return 0
