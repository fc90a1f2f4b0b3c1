"""``mpicomp bench collectives``: exchanges among real ranks, and the choice of ``auto``."""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpicomp.cli.options import add_device, table_columns
from mpicomp.job import plural

if TYPE_CHECKING:
    from mpicomp.compressors import Compressor

HELP = "time every exchange among the ranks of this job, check it, and compare auto's choice with the best"

_COMMAND = "bench collectives"
_NUMELS = "1024,1048576,16777216"
_COLUMNS = table_columns(
    "compressor ratio:g collective numel:d median_s:.4g low_s:.4g high_s:.4g samples:d stopped predicted_s:.4g "
    "speedup:.2f wire_bytes:.0f gain:.3f error:.1e compress_s:.3g exchange_s:.3g decode_s:.3g choosing_s:.2g"
)
_AUTO_COLUMNS = table_columns(
    "compressor ratio:g numel:d chosen median_s:.4g best best_s:.4g regret:+.1% regret_low:+.1% regret_high:+.1% "
    "best_dense best_dense_s:.4g behind_dense:+.1% mpi_s:.4g"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}. Start it with mpiexec or srun, or on an emulated cluster with mpicomp lab run. "
        "Dense exchanges are measured in any case: speed-ups are over them."
    )
    parser.add_argument("--numel", metavar="N[,..]", help=f"float32 elements ({_NUMELS})")
    parser.add_argument(
        "--compressor", metavar="A[,..]", help="names from `mpicomp list`, or configurations as JSON (topk)"
    )
    parser.add_argument("--ratio", default="0.01", metavar="R[,..]", help="kept fractions (%(default)s)")
    parser.add_argument(
        "--collective",
        metavar="X[,..]",
        help="names from `mpicomp list`, with those that they are built on as in star-topk:ring; "
        "all for all that fit; auto for the one that mpicomp chooses at every step (all,auto)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds of timing a plan that is not yet known well (%(default)s)",
    )
    add_device(parser, "where gradients are, and are compressed")
    parser.add_argument("--json", metavar="F", help="write the rows to F as one JSON object, after every cell")
    parser.add_argument(
        "--calibrate",
        metavar="F",
        help="probe links and operations for about a second and write the cost model to F; without other options "
        "that is all that is done",
    )
    parser.add_argument("--from", dest="known", metavar="F", help="read the cost model from F in place of a probe")


def run(arguments: argparse.Namespace) -> int:
    """Measure on all ranks, print on rank 0; 1 where a mean was wrong."""
    from mpicomp.bench.collectives import Settings, measure
    from mpicomp.bench.measure import results

    from mpicomp.cli.options import check_writable, read_compressors, read_list, read_numels, read_ratios
    from mpicomp.collectives import bind
    from mpicomp.errors import ConfigurationError, IncompatiblePairError

    numels = read_numels(_COMMAND, _NUMELS if arguments.numel is None else arguments.numel)
    ratios = read_ratios(_COMMAND, arguments.ratio)
    words = read_list("topk" if arguments.compressor is None else arguments.compressor)
    compressors = read_compressors(_COMMAND, words, ratios)
    collectives, auto = _collectives(arguments.collective, compressors)
    if not compressors:
        raise ConfigurationError(f"{_COMMAND}: --compressor names nothing; see `mpicomp list`")
    if not 0 < arguments.limit < float("inf"):
        raise ConfigurationError(f"{_COMMAND}: --limit must be a number of seconds above 0, got {arguments.limit}")
    if arguments.known is not None and arguments.calibrate is not None:
        raise ConfigurationError(f"{_COMMAND}: --calibrate measures the model that --from reads; give one of them")
    check_writable(_COMMAND, arguments.json, arguments.calibrate)

    from mpicomp.bench import devices

    from mpicomp.cost import calibrate, share_model
    from mpicomp.gpu import HOST
    from mpicomp.reducer.agreement import run_collectively

    on_gpu = arguments.device == "gpu"
    gpu = devices.find() if on_gpu else 0
    from mpicomp.mpi.comm import MPITransport

    transport = MPITransport()
    try:
        device = run_collectively(lambda: devices.device_on(_COMMAND, gpu), transport, _COMMAND) if on_gpu else HOST
        model = None
        if arguments.known is not None:
            model = transport.run(share_model(arguments.known, transport))
        elif transport.group.size > 1 or arguments.calibrate is not None:
            model = calibrate(transport)
        if arguments.calibrate is not None and model is not None:
            measures = any((arguments.numel, arguments.compressor, arguments.collective, arguments.json))
            if transport.group.rank == 0:
                model.save(arguments.calibrate)
                if not measures:
                    print(f"{_COMMAND}: the cost model was written to {arguments.calibrate}")
            if not measures:
                return 0
        name = devices.device_name(_COMMAND) if on_gpu else "cpu"
        job, print_root = results.begin(_COMMAND, "", transport.group, name)
        if transport.group.size == 1:
            print_root("one rank alone sends nothing: start it with mpiexec, srun, or mpicomp lab run")
        print_root("a sample is the slowest rank's time of one exchange, which all ranks begin at once")
        for pair in itertools.product(compressors, collectives or ()):
            try:
                bind(*pair)
            except IncompatiblePairError as error:
                print_root(f"left out: {error}")

        def write(found: Sequence[Mapping[str, Any]]) -> None:
            if transport.group.rank == 0 and arguments.json is not None:
                results.write(arguments.json, found, 1, name, job)

        settings = Settings(numels, compressors, collectives, auto, arguments.limit)
        found = measure(settings, transport, model, print_root, write, device)
    finally:
        transport.close()
    wrong = [row for row in found if row["correct"] is False]
    if transport.group.rank == 0:
        _show(found, wrong, f"{plural(job['ranks'], 'rank')} on {plural(job['hosts'], 'host')}")
    return int(bool(wrong))


def _collectives(text: str | None, compressors: Sequence["Compressor"]) -> tuple[list[str] | None, bool]:
    # The fixed collectives, None for all, and whether auto was named.
    from mpicomp.cli.options import read_list
    from mpicomp.collectives import bind, collective_class
    from mpicomp.compressors import Dense
    from mpicomp.errors import ConfigurationError, IncompatiblePairError

    names = ["all", "auto"] if text is None else list(dict.fromkeys(read_list(text)))
    if not names:
        raise ConfigurationError(f"{_COMMAND}: --collective names nothing; see `mpicomp list`")
    if "all" in names:
        return None, "auto" in names
    fixed = [name for name in names if name != "auto"]
    for name in fixed:
        for part in name.split(":"):
            collective_class(part)
        reasons = []
        for compressor in [*compressors, Dense()]:
            try:
                bind(compressor, name)
            except IncompatiblePairError as error:
                reasons.append(error)
        if len(reasons) > len(compressors):
            raise reasons[0]
    return fixed, "auto" in names


def _show(found: Sequence[Mapping[str, Any]], wrong: Sequence[Mapping[str, Any]], where: str) -> None:
    from mpicomp.bench.measure import results
    from mpicomp.bench.measure.timed_plan import osu_blocks

    print(f"\n{osu_blocks(found, where)}")
    more = {} if all(row["settings"] is None for row in found) else {"compressor": "", "settings": ""}
    results.show(found, more | _COLUMNS)
    chosen = [row for row in found if row["chosen"] is not None]
    if chosen:
        print()
        results.show(chosen, more | _AUTO_COLUMNS)
    not_run = sum(row["median_s"] is None for row in found)
    if not_run:
        print(f"\nnot run, since they are predicted to take 20 times the best and more than --limit: {not_run}")
    for row in wrong:
        plan = " ".join(filter(None, (row["compressor"], row["settings"], row["collective"])))
        print(
            f"\nWRONG: {plan} with {row['numel']} elements: the mean is not "
            f"that of the gradients, or differs between ranks (error {row['error']:.2g})"
        )
