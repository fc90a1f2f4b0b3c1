"""What rounding errors up costs L-GreCo as published: ``python studies/papers/lgreco_parts.py``.

Its program cuts the limit of the error into 10,000 parts and rounds each layer's error up to whole ones. At every
adjustment of the same training the same tables are solved by finer parts, too, and as mpicomp solves them.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import lgreco_tables
import numpy as np
import paper_runs
from numpy.typing import NDArray

from mpicomp.cli import run_program
from mpicomp.policies.plan_tradeoff import Choice, least_total, total
from mpicomp.setting_checks import check_least
from mpicomp.systems.lgreco import layer_policy as policy

_STUDY = "lgreco_parts"
_FINER = 20  # times


def adjustments(family: str, ranks: int, steps: int) -> list[dict[str, float]]:
    """Train as published; return of each adjustment the bytes over those of the uniform setting."""
    found: list[dict[str, float]] = []

    def solve(
        errors: Sequence[NDArray[np.float64]], sizes: Sequence[NDArray[np.float64]], limit: float, default: Choice,
        strict: bool = False,
    ) -> Choice:  # fmt: skip
        chosen = least_total(errors, sizes, limit, default, strict=strict)
        finer = least_total(errors, sizes, limit, default, bins=_FINER * 10_000, strict=strict)
        here = least_total(errors, sizes, limit, default)
        uniform = total(sizes, default)
        found.append({
            "layers": len(errors), "published": total(sizes, chosen) / uniform, "finer": total(sizes, finer) / uniform,
            "here": total(sizes, here) / uniform, "above": total(errors, here) / limit - 1,
            "most to gain": 1 - sum(float(error.min()) for error in errors) / limit,
        })  # fmt: skip
        return chosen

    compressor, collective = lgreco_tables.FAMILIES[family]
    arm = paper_runs.Arm(compressor, collective, lgreco_tables.arms(steps)["as published"])
    with mock.patch.object(policy, "least_total", solve):
        paper_runs.train(arm, "resnet20", steps, ranks)
    return found[::ranks]  # every rank solves the same


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="studies/papers/lgreco_parts.py", description="Show what rounding errors up costs L-GreCo as published."
    )
    parser.add_argument("--family", default="top-k", choices=list(lgreco_tables.FAMILIES), help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=160, metavar="S", help="of a training (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="(%(default)s)")
    parser.set_defaults(alone=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Train and print the table."""
    steps, ranks = check_least(_STUDY, "--steps", arguments.steps, 24), check_least(_STUDY, "--ranks", arguments.ranks)
    found = adjustments(arguments.family, ranks, steps)
    rows: list[dict[str, Any]] = [{"adjustment": number} | sizes for number, sizes in enumerate(found, 1)]
    paper_runs.show(f"Sizes over those of the uniform setting, {arguments.family}", rows, {
        "adjustment": "d", "layers": "d", "published": ".2f", "finer": ".2f", "here": ".2f", "above": ".2%",
        "most to gain": ".1%",
    }, [
        f"published: 10,000 parts; finer: {_FINER} times as many; here: one part more for each layer, which lets the "
        "error be above the limit by the share in the next column",
        "most to gain: by how much the error could be smaller with the least one of each layer",
    ])  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
