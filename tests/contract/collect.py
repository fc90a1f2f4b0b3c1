"""Write the contract with users' scripts to `contract.txt`: public names, flags and fields of JSON, sorted.

    python tests/contract/collect.py

A line is a module with its names, a class or function of `mpicomp`, `mpicomp.torch` or a published system with its
parameters, a command with its flags, or an object in a command's JSON with its fields.
"""

import argparse
import importlib
import inspect
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

CONTRACT = Path(__file__).with_name("contract.txt")
MODULES = [
    "mpicomp",
    "mpicomp.bench.tasks",
    "mpicomp.checkpoint",
    "mpicomp.collectives",
    "mpicomp.compressors",
    "mpicomp.cost",
    "mpicomp.errors",
    "mpicomp.mpi",
    "mpicomp.policies",
    "mpicomp.reducer",
    "mpicomp.systems.accordion",
    "mpicomp.systems.flexible",
    "mpicomp.systems.gravac",
    "mpicomp.systems.lgc",
    "mpicomp.systems.lgreco",
    "mpicomp.testing",
    "mpicomp.torch",
]
COLLECTIVES = ["--compressor", "dense,topk", "--ratio", "0.1", "--collective", "allgather,allreduce,auto"]
OUTPUTS = {
    "doctor": ["doctor", "--json"],
    "list": ["list", "--json"],
    "bench kernels": ["bench", "kernels", "--numel", "1000", "--ratio", "0.1", "--json", "{file}"],
    "bench collectives": ["bench", "collectives", "--numel", "1000", *COLLECTIVES, "--json", "{file}"],
    "train": ["train", "--task", "digits", "--compressor", "topk", "--steps", "5", "--json", "{file}"],
    "train metrics": ["train", "--task", "digits", "--compressor", "topk", "--steps", "5", "--metrics", "{file}"],
}


def names() -> Iterator[str]:
    """Yield a line for each module, and for each callable of those that scripts import."""
    for name in MODULES:
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [
            key for key, value in vars(module).items() if getattr(value, "__module__", None) == name and key[0] != "_"
        ]
        yield " ".join(["names", name, *sorted(public)])
        for key in sorted(public) if name in ("mpicomp", "mpicomp.torch") or ".systems." in name else ():
            value = getattr(module, key)
            if callable(value) and key != "MpicompError":
                yield " ".join(["parameters", f"{name}.{key}", *sorted(inspect.signature(value).parameters)])


def flags() -> Iterator[str]:
    """Yield a line for each command."""
    from mpicomp import cli

    def walk(parser: argparse.ArgumentParser, command: str) -> Iterator[str]:
        options = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
        yield " ".join(["flags", command, *sorted(options)])
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, inner in action.choices.items():
                    yield from walk(inner, f"{command} {name}")

    yield from walk(cli._parser(None), "mpicomp")


def fields() -> Iterator[str]:
    """Yield a line for each object in the JSON of each command."""
    for command, words in OUTPUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "out.json")
            line = [sys.executable, "-m", "mpicomp", *(word.format(file=file) for word in words)]
            printed = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300).stdout
            text = file.read_text() if "{file}" in words else printed
        objects: defaultdict[str, set[str]] = defaultdict(set)
        # Lines of JSON share one list of fields: a record may leave out those that say nothing in its step.
        for value in map(json.loads, text.splitlines()) if "--metrics" in words else [json.loads(text)]:
            _add_fields(value, command.replace(" ", "-"), objects)
        yield from (" ".join(["fields", path, *sorted(keys)]) for path, keys in sorted(objects.items()))


def _add_fields(value: object, path: str, objects: defaultdict[str, set[str]]) -> None:
    if isinstance(value, dict):
        objects[path] |= value.keys()
    for key, inner in value.items() if isinstance(value, dict) else [("[]", each) for each in value or ()]:
        if isinstance(inner, (dict, list)):
            _add_fields(inner, path + (key if key == "[]" else f".{key}"), objects)


if __name__ == "__main__":
    CONTRACT.write_text("".join(f"{line}\n" for part in (names, flags, fields) for line in part()))
