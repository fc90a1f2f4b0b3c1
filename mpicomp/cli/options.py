"""Options that several commands share: compressors, policies, lists of ratios, files to write."""

import argparse
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpicomp.bench.tasks import Task
    from mpicomp.compressors import Compressor
    from mpicomp.mpi import Transport
    from mpicomp.mpi.rounds import Group


def add_plugin(parser: argparse.ArgumentParser) -> None:
    """Declare the option for users' own compressors, collectives, policies and tasks; `mpicomp.cli` loads them."""
    parser.add_argument(
        "--plugin",
        action="append",
        metavar="FILE_OR_MODULE",
        help="load files that register names of your own, as MPICOMP_PLUGINS does; may be given several times",
    )


def add_task(parser: argparse.ArgumentParser) -> None:
    """Declare the option for the task."""
    parser.add_argument("--task", default="text-lstm", help="digits, text-gpt or text-lstm (%(default)s)")


def start_training(
    command: str, arguments: argparse.Namespace, data: str | None = None
) -> tuple["Transport", "Task", Any]:
    """Start MPI; return the transport, the task of `add_task`'s options, and torch's device of `add_device`'s."""
    from mpicomp.bench import devices

    gpu = devices.find() if arguments.device == "gpu" else None  # before MPI starts, as it calls another program
    # MPI starts before torch is loaded: Slurm's pmi2 cuts the longer messages that MPICH sends it afterwards.
    from mpicomp.mpi.comm import MPITransport

    transport = MPITransport()
    task = load_task(command, arguments, data, transport.group)
    from mpicomp.bench.trainer import CPU
    from mpicomp.reducer.agreement import run_collectively

    device = CPU if gpu is None else run_collectively(lambda: devices.torch_device(command, gpu), transport, command)
    return transport, task, device


def load_task(command: str, arguments: argparse.Namespace, data: str | None, group: "Group") -> "Task":
    """Return the task of `add_task`'s options, after MPI has started; its first batch is drawn, which may raise."""
    from mpicomp.errors import ConfigurationError

    try:
        from mpicomp.bench.tasks import get_task

        task = get_task(arguments.task, arguments.seed, data)
        task.batch(0, group.rank, group.size)
    except ImportError as error:
        raise ConfigurationError(f"{command}: {error}: pip install 'mpicomp[torch,bench]'") from error
    except (ValueError, OSError) as error:
        raise ConfigurationError(str(error)) from error
    return task


def add_device(parser: argparse.ArgumentParser, place: str) -> None:
    """Declare the option for a device."""
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help=f"{place} (%(default)s)")


def writes_files() -> bool:
    """Return whether this process writes the files of a job: the first one that the launcher has started."""
    from mpicomp.job import launcher

    launch = launcher.detect()
    return launch is None or launch.rank == 0


def check_writable(command: str, *paths: str | None) -> None:
    """Raise now, and not after hours of work, if a file cannot be written by rank 0."""
    from mpicomp.errors import ConfigurationError

    for path in filter(None, paths if writes_files() else ()):
        folder = os.path.dirname(path) or "."
        if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise ConfigurationError(f"{command}: '{path}' cannot be written; make its folder, or name another file")


def write_json(path: str, content: Any) -> None:
    """Write an object to a file as JSON."""
    from mpicomp.job import whole_file

    with whole_file(path) as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def table_columns(text: str) -> dict[str, str]:
    """Return the names of a table's columns and the formats of their values, from words ``name:format``."""
    return {name: form for name, _, form in (word.partition(":") for word in text.split())}


def check_folder(command: str, path: str) -> None:
    """Make a folder, or raise now, and not after hours of work, if nothing can be written into it."""
    from mpicomp.errors import ConfigurationError

    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{command}: the folder '{path}' cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise ConfigurationError(f"{command}: nothing can be written into '{path}'; name another folder")


def check_drawing(command: str, extras: str = "report", names: Sequence[str] = ()) -> None:
    """Raise now, and not after hours of work, if packages that draw a report, or others of ``names``, are missing."""
    import importlib.util

    from mpicomp.errors import ConfigurationError

    needed = ("jinja2", "matplotlib", "msgspec", *names)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"{command}: needs {', '.join(missing)}: pip install 'mpicomp[{extras}]'")


def read_ratios(command: str, text: str) -> list[float]:
    """Read kept fractions with commas between them; duplicates count once."""
    from mpicomp.errors import ConfigurationError
    from mpicomp.setting_checks import check_ratio

    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"{command}: --ratio must be numbers such as 0.001,0.01, got {text!r}") from None
    return list(dict.fromkeys(check_ratio(command, number) for number in numbers))


def read_list(text: str) -> list[str]:
    """Cut at commas, but not inside a JSON object.

    >>> read_list('topk, {"id": "topk", "wire": "fp16"},dense')
    ['topk', '{"id": "topk", "wire": "fp16"}', 'dense']
    """
    words = []
    text = text.strip(" ,")
    while text:
        end = text.find(",") if "," in text else len(text)
        if text.startswith("{"):
            try:
                end = json.JSONDecoder().raw_decode(text)[1]
            except json.JSONDecodeError:
                end = len(text)  # the parser of the object reports the error
        words.append(text[:end].strip())
        text = text[end:].lstrip(" ,")
    return words


def read_configuration(command: str, text: str, ratio: float) -> dict[str, Any]:
    """Read a name or a JSON configuration, with this ratio if the compressor has one that is not set."""
    from dataclasses import fields

    from mpicomp.compressors import compressor_class

    config = read_named(command, "--compressor", text)
    if "id" in config and any(field.name == "ratio" for field in fields(compressor_class(config["id"]))):
        config.setdefault("ratio", ratio)
    return config


def read_numels(command: str, text: str) -> list[int]:
    """Read lengths with commas between them; duplicates count once."""
    from mpicomp.errors import ConfigurationError
    from mpicomp.setting_checks import check_least

    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigurationError(
            f"{command}: --numel must be whole numbers such as 1024,1048576, got {text!r}"
        ) from None
    for number in numbers:
        check_least(command, "--numel", number)
        if number >= 1 << 32:
            raise ConfigurationError(f"{command}: --numel must be below 2**32, got {number}; indices travel in 32 bits")
    return list(dict.fromkeys(numbers))


def read_compressors(command: str, words: Sequence[str], ratios: Sequence[float]) -> list["Compressor"]:
    """Return every named compressor, at every ratio if it has one that is not set; none twice."""
    from mpicomp.compressors import get_compressor

    found: list[Compressor] = []
    for word in words:
        for ratio in ratios:
            compressor = get_compressor(read_configuration(command, word, ratio))
            if compressor not in found:
                found.append(compressor)
    return found


def read_named(command: str, option: str, text: str) -> dict[str, Any]:
    """Read a name or a JSON object as a configuration."""
    from mpicomp.errors import ConfigurationError

    if not text.lstrip().startswith("{"):
        return {"id": text}
    try:
        config: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{command}: {option} must be a name or JSON, got {text!r}: {error}") from error
    return config
