"""``mpicomp list``: what there is and what fits what."""

import argparse
import json
from typing import Any

HELP = "list every compressor, collective and policy, and what fits with what"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the lists."""
    from mpicomp.collectives import collective_class, fitting, list_collectives
    from mpicomp.compressors import compressor_class, list_compressors
    from mpicomp.policies import list_policies, policy_class

    compressors: list[dict[str, Any]] = []
    for name in list_compressors():
        cls = compressor_class(name)
        example = cls()
        compressors.append(
            {
                "name": name,
                "family": cls.family,
                "message": cls.message,
                "parameters": {key: value for key, value in example.get_config().items() if key != "id"},
                "feedback": example.feedback,
                "collectives": fitting(cls),
                "wire_bytes_per_element": example.wire_bytes_per_element(4),
                "paper": cls.paper,
            }
        )
    collectives: list[dict[str, Any]] = [
        {
            "name": name,
            "message": collective_class(name).messages,
            "compressors": [entry["name"] for entry in compressors if name in entry["collectives"]],
            "inner": _inner(name),
            "paper": collective_class(name).paper,
        }
        for name in list_collectives()
    ]
    policies: list[dict[str, Any]] = [
        {
            "name": name,
            "parameters": {key: value for key, value in policy_class(name)().get_config().items() if key != "id"},
            "paper": policy_class(name).paper,
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
        feedback = "on" if entry["feedback"] else "off"
        print(f"    family {entry['family']}, {entry['message']} messages, feedback {feedback}")
        print(f"    bytes on the wire for a float32: {entry['wire_bytes_per_element']:g}")
        print(f"    collectives: {', '.join(entry['collectives'])}")
        print(f"    paper: {entry['paper']}")
    print("collectives")
    for entry in collectives:
        print(f"  {entry['name']}")
        print(f"    carries {entry['message']} messages of {', '.join(entry['compressors'])}")
        if entry["inner"]:
            print(f"    built upon another, which may follow a colon: {', '.join(entry['inner'])}")
        print(f"    paper: {entry['paper']}")
    print("policies (defaults in brackets)")
    for entry in policies:
        parameters = ", ".join(f"{key}={value}" for key, value in entry["parameters"].items())
        print(f"  {entry['name']} ({parameters})" if parameters else f"  {entry['name']}")
        print(f"    paper: {entry['paper']}")
    return 0


def _inner(collective: str) -> list[str]:
    """Give the collectives that one may be built upon."""
    from mpicomp.collectives import variants
    from mpicomp.compressors import get_compressor, list_compressors

    names = [name for compressor in list_compressors() for name in variants(get_compressor(compressor))]
    inner = (name.split(":") for name in names if name.startswith(f"{collective}:"))
    return sorted({words[1] for words in inner})
