"""What others' scripts rely on: public names with their parameters, flags of the command line, fields of JSON.

    python tests/contract/collect.py F.json

writes the list of a checkout. `contract.json` was made before the layout of the packages was changed; names, flags and
fields may be added to it, and none may go.
"""

import argparse
import importlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "studies"))  # where the scripts find each other
MODULES = [
    "mpicomp",
    "mpicomp.bench.tasks",
    "mpicomp.checkpoint",
    "mpicomp.collectives",
    "mpicomp.compressors",
    "mpicomp.cost",
    "mpicomp.errors",
    "mpicomp.policies",
    "mpicomp.reducer",
    "mpicomp.testing",
    "mpicomp.torch",
    "mpicomp.transport",
]
OUTPUTS = {
    "doctor": ["doctor", "--json"],
    "list": ["list", "--json"],
    "bench kernels": ["bench", "kernels", "--numel", "1000", "--ratio", "0.1", "--json", "{file}"],
    "bench collectives": [
        *["bench", "collectives", "--numel", "1000", "--compressor", "dense,topk", "--ratio", "0.1"],
        *["--collective", "allgather,allreduce,auto", "--json", "{file}"],
    ],
    "train": [
        *["train", "--task", "digits", "--compressor", "topk", "--steps", "5"],
        *["--json", "{file}", "--metrics", "{file}l"],
    ],
}


def signatures(name: str, names: Iterable[str] | None = None) -> dict[str, list[str]]:
    """Return the public names of a module, or those that are given, each with its parameters."""
    module = importlib.import_module(name)
    public = (
        names
        or getattr(module, "__all__", None)
        or [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", None) == name
        ]
    )
    found = {}
    for key in sorted(public):
        value = getattr(module, key)
        found[key] = list(inspect.signature(value).parameters) if callable(value) and not _is_alias(value) else []
        if inspect.isclass(value):
            found[key] += [f".{own}" for own in dir(value) if not own.startswith("_")]
    return found


def _is_alias(value: object) -> bool:
    """Tell what is callable and has no signature: type aliases."""
    try:
        inspect.signature(value)
    except (TypeError, ValueError):
        return True
    return False


def documented() -> list[str]:
    """Return the dotted names that the docs give and that exist."""
    text = "\n".join(path.read_text() for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
    return sorted({name for name in re.findall(r"\bmpicomp(?:\.\w+)+", text) if exists(name)})


def exists(name: str) -> bool:
    """Tell whether a dotted name leads to a module or to something in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def flags() -> dict[str, list[str]]:
    """Return the flags of every command, and of the studies that some have become."""
    from mpicomp import cli

    found: dict[str, list[str]] = {}

    def look(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> None:
        found[" ".join(words)] = sorted(option for action in parser._actions for option in action.option_strings)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, inner in action.choices.items():
                    look(inner, (*words, name))

    look(cli._parser(None), ())
    for words, script in cli.MOVED.items():
        look(importlib.import_module(Path(script).stem).parser(), words)
    return found


def fields(value: object, path: str = "") -> set[str]:
    """Return the paths of all fields of a JSON value; elements of a list share theirs."""
    if isinstance(value, dict):
        return {path} | {own for key, inner in value.items() for own in fields(inner, f"{path}.{key}")}
    if isinstance(value, list):
        return {path} | {own for inner in value for own in fields(inner, f"{path}[]")}
    return {path}


def outputs() -> dict[str, list[str]]:
    """Return the fields of what each command writes."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, words in OUTPUTS.items():
            file = Path(folder) / "out.json"
            command = [sys.executable, "-m", "mpicomp", *(word.format(file=file) for word in words)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
            text = file.read_text() if "{file}" in words else done.stdout
            found[name] = sorted(fields(json.loads(text)) - {""})
            metrics = Path(f"{file}l")
            if metrics.exists():
                lines = [json.loads(line) for line in metrics.read_text().splitlines()]
                found[f"{name} --metrics"] = sorted(fields(lines) - {""})
                metrics.unlink()
            file.unlink(missing_ok=True)
    return found


def collect() -> dict[str, object]:
    """Return the whole contract as this checkout keeps it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return {
            "names": {name: signatures(name) for name in MODULES},
            "documented": documented(),
            "flags": flags(),
            "fields": outputs(),
        }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(collect(), indent=1) + "\n")
