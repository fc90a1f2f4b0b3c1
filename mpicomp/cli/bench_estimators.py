"""``mpicomp bench estimators``: reached over asked ratio of every estimator of a threshold."""

import argparse

HELP = "show how near every threshold estimator comes to the ratio it was asked for"

_COMMAND = "bench estimators"
_COLUMNS = {"name": "", "data": "", "ratio": "g", "mean": ".3f", "min": ".3f", "max": ".3f"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--numel", type=int, default=2_000_000, metavar="N", help="elements drawn (%(default)s)")
    parser.add_argument("--ratio", default="0.1,0.01,0.001", metavar="R[,..]", help="kept fractions (%(default)s)")
    parser.add_argument("--steps", type=int, default=50, metavar="S", help="that are counted (%(default)s)")
    parser.add_argument(
        "--data",
        metavar="D[,..]",
        help="laplace, gamma, normal, student; digits, text-lstm and vgg for the gradients of their training (all)",
    )
    parser.add_argument(
        "--gradients", metavar="F.npz", help="gradients of your own, in place of --data: arrays of (steps, elements)"
    )
    parser.add_argument(
        "--no-feedback", action="store_true", help="select from real gradients as they are, without error feedback"
    )
    parser.add_argument("--json", metavar="F", help="write the rows to F as one JSON object")
    parser.set_defaults(alone=True)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print a table."""
    from mpicomp.bench.estimators import WARM, Settings, check_data, load_gradients, measure, sources, trainable
    from mpicomp.bench.measure import results
    from mpicomp.cli.options import check_least, check_writable, read_list, read_ratios

    check_least(_COMMAND, "--numel", arguments.numel)
    check_least(_COMMAND, "--steps", arguments.steps)
    ratios = read_ratios(_COMMAND, arguments.ratio)
    distributions, tasks = sources()
    recorded, left_out = {}, []
    if arguments.data is not None:
        data = list(dict.fromkeys(read_list(arguments.data)))
    elif arguments.gradients is not None:
        data = []
    else:
        data = distributions + (tasks if trainable() else [])
        left_out = [] if trainable() else tasks
    if arguments.json is not None:
        check_writable(_COMMAND, arguments.json)
    check_data(data)
    if arguments.gradients is not None:
        recorded = load_gradients(arguments.gradients, WARM + arguments.steps)
    feedback = not arguments.no_feedback
    settings = Settings(arguments.numel, tuple(ratios), arguments.steps, tuple(data), recorded, feedback)

    if left_out:
        print(f"left out: {', '.join(left_out)}; they need pip install 'mpicomp[torch,bench]'")
    found = measure(settings, lambda text: print(text, flush=True))
    results.show(found, _COLUMNS)
    if arguments.json is not None:
        results.write(arguments.json, found, 1)
    return 0
