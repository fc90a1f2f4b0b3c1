"""``mpicomp bench kernels``: how long compressors and their kernels take, in copies of the array."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from mpicomp.cli.options import add_device, table_columns

HELP = "time every sparsifier, quantiser and kernel on this machine, in multiples of one memcpy of the array"

_COMMAND = "bench kernels"
_COLUMNS = table_columns(
    "name ratio:g median_s:.3g copies:.2f p25_s:.3g p75_s:.3g repeats:d threads:d ratio_reached:.3g"
)
_ON_A_GPU = {name: form for name, form in _COLUMNS.items() if name != "threads"}
_ON_A_GPU |= {"behind_s": ".3g", "behind_copies": ".2f"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--numel", type=int, default=25_600_000, metavar="N", help="float32 elements (%(default)s)")
    parser.add_argument("--ratio", default="0.001,0.01", metavar="R[,..]", help="kept fractions (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="T", help="that share a sweep (%(default)s)")
    parser.add_argument(
        "--compressor",
        metavar="A[,..]",
        help="names from `mpicomp list`, or configurations as JSON (all that select or pack)",
    )
    parser.add_argument(
        "--repeats", type=int, default=20, metavar="K", help="of kernels that are not slow (%(default)s)"
    )
    add_device(parser, "where arrays are")
    parser.add_argument("--json", metavar="F", help="write the rows to F as one JSON object")
    parser.set_defaults(alone=True)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print a table."""
    from mpicomp.bench import devices
    from mpicomp.bench.kernels import Settings, measurable, measure
    from mpicomp.bench.measure import results

    from mpicomp.cli.options import check_writable, read_numels, read_ratios
    from mpicomp.gpu import HOST
    from mpicomp.setting_checks import check_least

    read_numels(_COMMAND, str(arguments.numel))
    check_least(_COMMAND, "--threads", arguments.threads)
    check_least(_COMMAND, "--repeats", arguments.repeats)
    ratios = read_ratios(_COMMAND, arguments.ratio)
    compressors = _compressors(arguments, ratios, measurable(arguments.device))
    settings = Settings(arguments.numel, tuple(ratios), tuple(compressors), arguments.threads, arguments.repeats)
    check_writable(_COMMAND, arguments.json)
    name, device = "cpu", HOST
    where = f"{arguments.threads} thread{'s' * (arguments.threads > 1)}"
    if arguments.device == "gpu":
        name = where = devices.device_name(_COMMAND)
        device = devices.device_on(_COMMAND)

    print(f"{_COMMAND}: {settings.numel:,} float32, {where}; copies are multiples of a memcpy", flush=True)
    found = measure(settings, device)
    results.show(found, _COLUMNS if arguments.device == "cpu" else _ON_A_GPU)
    if arguments.json is not None:
        results.write(arguments.json, found, settings.threads, name)
    return 0


def _compressors(arguments: argparse.Namespace, ratios: Sequence[float], known: Sequence[str]) -> list[Any]:
    from mpicomp.bench.kernels import SUITED

    from mpicomp.cli.options import read_compressors, read_list
    from mpicomp.errors import ConfigurationError

    suited = [json.dumps({"id": name} | SUITED.get(name, {})) for name in known]
    words = suited if arguments.compressor is None else read_list(arguments.compressor)
    compressors = read_compressors(_COMMAND, words, ratios)
    for compressor in compressors:
        if compressor.id not in known:
            raise ConfigurationError(
                f"{_COMMAND}: '{compressor.id}' neither selects nor packs on the {arguments.device}; "
                f"there are {', '.join(known)}"
            )
    if not compressors:
        raise ConfigurationError(f"{_COMMAND}: --compressor names nothing; there are {', '.join(known)}")
    return compressors
