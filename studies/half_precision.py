"""What a sum of gradients in float16 loses, as PyTorch's hook for it sums: ``python studies/half_precision.py``.

Ranks are simulated in this process. To separate what training makes of rounding errors from what float16 does to
small gradients, errors of the same size, drawn at random, are added to means in float32.
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from in_process import SharedModel
from mpicomp.bench.measure import results
from mpicomp.bench.tasks import get_task

from mpicomp.cli import run_program
from mpicomp.cli.options import read_list
from mpicomp.errors import UnknownNameError
from mpicomp.setting_checks import check_least

_STUDY = "half-precision"
_NORMAL = torch.finfo(torch.float16).tiny  # smaller ones have fewer bits
_HALF_A_BIT = 2.0**-11  # the largest relative error of rounding to float16
_MEANS = ("float32", "float16", "float16-scaled", "noise")
_SCALE = 2.0**8  # with which gradients of text-gpt do not overflow


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="studies/half_precision.py",
        description="Train with means of gradients in float32; as PyTorch's float16 hook makes them; as it makes them "
        "of gradients times 256; and in float32 with a random error of at most half a bit of float16 in each element "
        "of each rank, which a number after a colon draws again. Shares are of what ranks' elements other than 0 "
        "become: 0, or too small for all bits of float16.",
    )
    parser.add_argument("--task", default="text-gpt", metavar="T", help="as of mpicomp train (%(default)s)")
    parser.add_argument("--steps", type=int, default=56, metavar="S", help="of each training (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="simulated (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="K", help="of model and batches (%(default)s)")
    default = "float32,float16,float16-scaled,noise:1,noise:2,noise:3"
    parser.add_argument("--means", default=default, metavar="M[,..]", help="(%(default)s)")
    parser.set_defaults(alone=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Train with each, and print a row for it."""
    check_least(_STUDY, "--steps", arguments.steps, 1)
    check_least(_STUDY, "--ranks", arguments.ranks, 1)
    means = read_list(arguments.means)
    for name in means:
        if name.partition(":")[0] not in _MEANS:
            raise UnknownNameError(f"{_STUDY}: --means", name, _MEANS)
    for name in means:
        row = train(arguments.task, arguments.seed, arguments.steps, arguments.ranks, name)
        results.show([row], {"means": "", "quality": ".3f", "zero": ".4f", "small": ".4f"})
    return 0


def train(name: str, seed: int, steps: int, ranks: int, means: str) -> dict[str, object]:
    """Return the held-out quality of a training, and the shares of elements that are lost or shortened."""
    shared = SharedModel(get_task(name, seed), steps)
    parameters = list(shared.parameters.values())
    kind, _, draw = means.partition(":")
    generator = torch.Generator().manual_seed(int(draw or 0))
    elements = zeros = small = 0
    for step in range(steps):
        shares = []
        for rank in range(ranks):
            shared.backward(step, rank, ranks)
            grad = torch.cat([parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None])
            shares.append(share_of(grad, ranks, kind, generator))
            there = grad != 0
            elements += int(there.sum())
            zeros += int((there & (shares[-1] == 0)).sum())
            small += int((there & (shares[-1].abs() < _NORMAL)).sum())
        mean = summed(shares).float() / (_SCALE if kind == "float16-scaled" else 1)
        start = 0
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.copy_(mean[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()
        shared.updater.update()
    return {"means": means, "quality": shared.quality(), "zero": zeros / elements, "small": small / elements}


def share_of(gradient: torch.Tensor, ranks: int, means: str, generator: torch.Generator) -> torch.Tensor:
    """Return what a rank adds to a mean; the hook casts to float16 first, and divides then."""
    if means == "float32":
        return gradient / ranks
    if means == "noise":
        errors = torch.rand(gradient.shape, generator=generator) * 2 - 1
        return gradient * (1 + _HALF_A_BIT * errors) / ranks
    return (gradient * (_SCALE if means == "float16-scaled" else 1)).to(torch.float16).div_(ranks)


def summed(shares: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum, rounded to the type after each addition."""
    total = shares[0].clone()
    for share in shares[1:]:
        total += share
    return total


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
