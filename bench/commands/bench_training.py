"""``mpicomp bench training``: the throughput of training with each exchange."""

import argparse
from typing import TYPE_CHECKING

from mpicomp.cli.options import add_device, add_task, start_training, table_columns

if TYPE_CHECKING:
    from mpicomp.bench.training import Exchange

HELP = "train with several exchanges in turn and compare their throughput with that of no exchange at all"

_COMMAND = "bench training"
_EXCHANGES = "none,dense,topk,auto,ddp"
_COLUMNS = table_columns(
    "exchange ran median_s:.4g low_s:.4g high_s:.4g mean_s:.4g samples_per_s:.4g of_none:.3f of_none_low:.3f "
    "of_none_high:.3f forward_s:.3g backward_s:.3g after_s:.3g processor_s:.3g wire_bytes:.0f link_bytes:.0f "
    "quality:.4f replicas_equal"
)
_PHASE_COLUMNS = table_columns("exchange compress_s:.3g exchange_s:.3g decode_s:.3g")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}. Start it with mpiexec or srun, or on an emulated cluster with mpicomp lab run."
    )
    add_task(parser)
    parser.add_argument(
        "--exchange",
        default=_EXCHANGES,
        metavar="X[,..]",
        help="none; a compressor, or auto for mpicomp's own choice, each with a collective behind a "
        "colon where it is not auto, with -inline where it is to wait for backward, and with updates: before it to "
        "exchange updates in place of gradients; muon as in mpicomp train; ddp, ddp-fp16 and "
        "ddp-powersgd for PyTorch's over gloo; torchft-diloco for torchft's, which exchanges updates (%(default)s)",
    )
    parser.add_argument(
        "--every", type=int, default=1, metavar="H", help="steps from one exchange of updates to the next (%(default)s)"
    )
    parser.add_argument("--ratio", type=float, default=0.01, metavar="R", help="kept fraction (%(default)s)")
    parser.add_argument(
        "--steps", type=int, default=60, metavar="S", help="of each exchange that count, a multiple of B (%(default)s)"
    )
    parser.add_argument(
        "--blocks", type=int, default=12, metavar="B", help="in which they are done, in turn (%(default)s)"
    )
    parser.add_argument(
        "--warm-up", type=int, default=25, metavar="W", help="steps of each before that do not count (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the model, the batches and the schemes (%(default)s)")
    add_device(parser, "where models are")
    parser.add_argument("--json", metavar="F", help="write the rows to F as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Train on all ranks, print on rank 0; 1 where replicas that were to be equal are not."""
    from mpicomp.cli.options import check_writable, read_list
    from mpicomp.errors import ConfigurationError
    from mpicomp.setting_checks import check_least, check_ratio

    ratio = check_ratio(_COMMAND, arguments.ratio)
    exchanges = [_exchange(word, ratio) for word in dict.fromkeys(read_list(arguments.exchange))]
    if not exchanges:
        raise ConfigurationError(f"{_COMMAND}: --exchange names nothing; write for example {_EXCHANGES}")
    blocks = check_least(_COMMAND, "--blocks", arguments.blocks)
    steps, rest = divmod(check_least(_COMMAND, "--steps", arguments.steps), blocks)
    if rest:
        raise ConfigurationError(
            f"{_COMMAND}: --steps must be a multiple of --blocks, got {arguments.steps} and {blocks}"
        )
    warm_up = check_least(_COMMAND, "--warm-up", arguments.warm_up)
    every = check_least(_COMMAND, "--every", arguments.every)
    if steps % every or warm_up % every:
        raise ConfigurationError(
            f"{_COMMAND}: --every must divide the steps of a block and of the warm-up, {steps} and {warm_up}, so that "
            f"each has as many exchanges, got {every}"
        )
    check_writable(_COMMAND, arguments.json)

    transport, task, device = start_training(_COMMAND, arguments)
    from mpicomp.bench.measure import results
    from mpicomp.bench.training import NONE, Settings, rows_of, train_in_turn, trainers
    from torch import get_num_threads
    from torch.cuda import get_device_name

    group, hosts = transport.group, transport.group.hosts
    name = "cpu" if arguments.device == "cpu" else get_device_name(device)
    job, print_root = results.begin(_COMMAND, f"{task.name} on ", group, name)
    settings = Settings(steps, blocks, warm_up, every, arguments.seed)
    with trainers(exchanges, task, settings, transport, device) as made:
        trained = train_in_turn(made, task, settings, transport, print_root)
        numel = made[0].replica.numel
    transport.close()
    wrong = [one.exchange.name for one in trained if not one.equal and one.exchange.name != NONE]
    if group.rank != 0:
        return int(bool(wrong))
    facts = {
        "task": task.name,
        "ranks": group.size,
        "hosts": hosts,
        "parameters": numel,
        "batch_size": task.batch_size,
        "seed": arguments.seed,
        "warm_up": warm_up,
        "quality_name": task.quality_name,
    }
    found = rows_of(trained, task.batch_size * group.size, facts)
    if arguments.json is not None:
        results.write(arguments.json, found, get_num_threads(), name, job)
    print()
    results.show(found, _COLUMNS)
    phases = [(row["exchange"], row["phases_s"]) for row in found if row["phases_s"] is not None]
    if phases:
        print("\nphases: seconds of the exchange up to its last round, in rounds and after them")
        results.show(
            [{"exchange": name} | {f"{phase}_s": seconds[phase] for phase in seconds} for name, seconds in phases],
            _PHASE_COLUMNS,
        )
    for name in wrong:
        print(f"\nWRONG: {name}: the ranks did not end with the same parameters")
    return int(bool(wrong))


def _exchange(word: str, ratio: float) -> "Exchange":
    from mpicomp.bench.training import AUTO, INLINE, MUON, MUON_COMPRESSOR, OTHERS, UPDATES, Exchange

    from mpicomp.cli.options import read_configuration
    from mpicomp.compressors import get_compressor, list_compressors
    from mpicomp.errors import ConfigurationError, UnknownNameError
    from mpicomp.policies import UserSettings, get_policy

    if word in OTHERS:
        return Exchange(word)
    if word == MUON:
        return Exchange(word, get_compressor(MUON_COMPRESSOR))
    updates = word.startswith(UPDATES)
    if updates and word.endswith(INLINE):
        raise ConfigurationError(f"{_COMMAND}: updates are there after backward in any case, got '{word}'")
    name, colon, collective = word.removeprefix(UPDATES).removesuffix(INLINE).partition(":")
    alone = (*OTHERS, MUON)
    if name in alone:
        raise ConfigurationError(
            f"{_COMMAND}: '{name}' has no other collective, no form in line and none with updates:, got '{word}'; name "
            f"'{name}'"
        )
    if name not in (AUTO, *list_compressors()):
        raise UnknownNameError(f"{_COMMAND}: --exchange", name, [*alone, AUTO, *list_compressors()])
    compressor = None if name == AUTO else get_compressor(read_configuration(_COMMAND, name, ratio))
    if not colon:
        return Exchange(word, compressor)
    if collective != AUTO:
        policy = get_policy("auto" if compressor is None else "static")
        policy.configure(UserSettings(compressor, collective))  # a pair that does not fit is refused here
    return Exchange(word, compressor, collective)
