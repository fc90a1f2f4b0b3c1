"""``mpicomp list``: the registered names, and the pairs that fit."""

import argparse
import json
from typing import Any

from mpicomp.cli.options import add_plugin

_NUMEL = 1 << 22  # elements of the bucket whose memory is listed

HELP = "list every compressor, collective and policy, and the pairs that fit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_plugin(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the lists."""
    from mpicomp.collectives import COLLECTIVES, collective_class, list_collectives
    from mpicomp.policies import POLICIES, list_policies, policy_class

    compressors = compressor_entries()
    collectives: list[dict[str, Any]] = [
        {
            "name": name,
            "message": collective_class(name).messages,
            "compressors": [entry["name"] for entry in compressors if name in entry["collectives"]],
            "inner": _inner(name),
            "memory": _memory(name, compressors),
            "paper": collective_class(name).paper,
            "plugin": COLLECTIVES.plugin(name),
        }
        for name in list_collectives()
    ]
    policies: list[dict[str, Any]] = [
        {
            "name": name,
            "parameters": {key: value for key, value in policy_class(name)().get_config().items() if key != "id"},
            "paper": policy_class(name).paper,
            "as_published": hasattr(policy_class(name), "as_published"),
            "plugin": POLICIES.plugin(name),
        }
        for name in list_policies()
    ]
    if arguments.json:
        print(json.dumps({"compressors": compressors, "collectives": collectives, "policies": policies}, indent=1))
        return 0
    print("compressors (defaults in brackets)")
    for entry in compressors:
        parameters = ", ".join(f"{key}={value}" for key, value in entry["parameters"].items())
        print(f"  {entry['name']} ({parameters})")
        print(
            f"    family {entry['family']}, {entry['bias']}, {entry['message']} messages, feedback {_feedback(entry)}"
        )
        print(f"    bytes on the wire for a float32: {entry['wire_bytes_per_element']:g}")
        print(f"    collectives: {', '.join(entry['collectives'])}")
        _print_origin(entry)
    print("collectives")
    for entry in collectives:
        print(f"  {entry['name']}")
        print(f"    carries {entry['message']} messages of {', '.join(entry['compressors'])}")
        if entry["inner"]:
            print(f"    built on another, which may follow a colon: {', '.join(entry['inner'])}")
        if entry["memory"] is not None:
            scratch, held = entry["memory"].values()
            print(f"    memory on 4 ranks, in gradients: {scratch:g} in an exchange, {held:g} in a step")
        _print_origin(entry)
    print("policies (defaults in brackets)")
    for entry in policies:
        parameters = ", ".join(f"{key}={value}" for key, value in entry["parameters"].items())
        print(f"  {entry['name']} ({parameters})" if parameters else f"  {entry['name']}")
        _print_origin(entry)
    return 0


def compressor_entries() -> list[dict[str, Any]]:
    """Describe every compressor that is registered, at its defaults."""
    from mpicomp.collectives import fitting
    from mpicomp.compressors import COMPRESSORS, compressor_class, list_compressors

    entries: list[dict[str, Any]] = []
    for name in list_compressors():
        cls = compressor_class(name)
        example = cls()
        biased = "unbiased" if example.unbiased else "biased"
        entries.append(
            {
                "name": name,
                "class": cls.__name__,
                "family": cls.family,
                "bias": "exact" if cls.family == "dense" else biased,
                "message": cls.message,
                "parameters": {key: value for key, value in example.get_config().items() if key != "id"},
                "feedback": example.feedback,
                "contractive": example.contractive,
                "collectives": fitting(cls),
                "wire_bytes_per_element": example.wire_bytes_per_element(4),
                "paper": cls.paper,
                "as_published": hasattr(cls, "as_published"),
                "plugin": COMPRESSORS.plugin(name),
            }
        )
    return entries


def _memory(collective: str, compressors: list[dict[str, Any]]) -> dict[str, float] | None:
    # None where it cannot run here, as a learned code without torch
    import numpy as np

    from mpicomp.collectives import bind
    from mpicomp.compressors import get_compressor
    from mpicomp.errors import ConfigurationError
    from mpicomp.mpi.rounds import Group

    carried = [entry["name"] for entry in compressors if collective in entry["collectives"]]
    name = min(carried, key=lambda name: name not in ("dense", "topk", "onebit"))
    try:
        scheme = bind(get_compressor(name), collective)
    except ConfigurationError:
        return None
    needed = scheme.memory(_NUMEL, np.dtype(np.float32), Group(0, 4))
    return {key: round(nbytes / (4 * _NUMEL), 3) for key, nbytes in needed._asdict().items()}


def _print_origin(entry: dict[str, Any]) -> None:
    print(f"    paper: {entry['paper']}")
    if entry.get("as_published"):
        print(f"    with the paper's settings: {json.dumps({'id': entry['name'], 'as_published': True})}")
    if entry["plugin"] is not None:
        print(f"    plugin: {entry['plugin']}")


def _feedback(entry: dict[str, Any]) -> str:
    if entry["feedback"]:
        return "on"
    return "off" if entry["contractive"] else "refused"


def _inner(collective: str) -> list[str]:
    from mpicomp.collectives import variants
    from mpicomp.compressors import get_compressor, list_compressors

    names = [name for compressor in list_compressors() for name in variants(get_compressor(compressor))]
    inner = (name.split(":") for name in names if name.startswith(f"{collective}:"))
    return sorted({words[1] for words in inner})
