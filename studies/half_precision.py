"""What a sum of gradients in float16 loses, as PyTorch's hook for it sums: ``python studies/half_precision.py``.

Ranks are simulated in this process. Each trains with the means in float32, with those of ``fp16_compress_hook`` (cast,
divided by the number of ranks, summed in float16), and with the same hook on gradients times a power of two.
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from mpicomp.bench.measure import results
from mpicomp.bench.tasks import get_task
from mpicomp.bench.tasks.updating import Updater

from mpicomp.cli import run_program
from mpicomp.cli.options import check_least

_STUDY = "half-precision"
_NORMAL = torch.finfo(torch.float16).tiny  # smaller ones have fewer bits


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="studies/half_precision.py",
        description="Train with means of gradients in float32, with those that PyTorch's float16 hook makes, and with "
        "those that it makes of gradients times 2 to the power of each of --powers. Shares are of what ranks' elements "
        "other than 0 are in float16 once divided: 0, or too small for all bits.",
    )
    parser.add_argument("--task", default="text-gpt", metavar="T", help="as of mpicomp train (%(default)s)")
    parser.add_argument("--steps", type=int, default=56, metavar="S", help="of each training (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="simulated (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="K", help="of model and batches (%(default)s)")
    parser.add_argument("--powers", default="0,16", metavar="P[,..]", help="of 2 (%(default)s)")
    parser.set_defaults(alone=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Train with each, and print a row for it."""
    check_least(_STUDY, "--steps", arguments.steps, 1)
    check_least(_STUDY, "--ranks", arguments.ranks, 1)
    powers = [None, *map(int, arguments.powers.split(","))]
    rows = [train(arguments.task, arguments.seed, arguments.steps, arguments.ranks, power) for power in powers]
    results.show(rows, {"sums": "", "quality": ".3f", "zero": ".4f", "small": ".4f"})
    return 0


def train(name: str, seed: int, steps: int, ranks: int, power: int | None) -> dict[str, object]:
    """Return the held-out quality of a training, and the shares of elements that float16 loses or shortens.

    Parameters
    ----------
    name, seed, steps, ranks
        See `parser`.
    power : int or None
        Of the 2 that gradients are multiplied by before they are cast; None sums them in float32.
    """
    task = get_task(name, seed)
    model = task.model()
    parameters = list(model.parameters())
    updater = Updater(task, task.optimizer(model), steps)
    elements = zeros = small = 0
    for step in range(steps):
        shares = []
        for rank in range(ranks):
            model.zero_grad()
            task.loss(model, task.batch(step, rank, ranks)).backward()  # type: ignore[no-untyped-call]
            own = torch.cat([parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None])
            shares.append(own / ranks if power is None else divided(own, ranks, power))
            there = own != 0
            elements += int(there.sum())
            zeros += int((there & (shares[-1] == 0)).sum())
            small += int((there & (shares[-1].abs() < _NORMAL)).sum())
        mean = summed(shares).float() / 2.0 ** (power or 0)
        start = 0
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.copy_(mean[start : start + parameter.numel()].view_as(parameter))
                start += parameter.numel()
        updater.update()
    sums = "float32" if power is None else f"float16, times 2^{power}"
    shares_of = {"zero": zeros / elements, "small": small / elements}
    return {"sums": sums, "quality": task.evaluate(model), **shares_of}


def divided(gradient: torch.Tensor, ranks: int, power: int) -> torch.Tensor:
    """Return what the hook sums of a rank's gradient times a power of 2: cast, and then divided."""
    return (gradient * 2.0**power).to(torch.float16).div_(ranks)


def summed(shares: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum, rounded to the type after each addition."""
    total = shares[0].clone()
    for share in shares[1:]:
        total += share
    return total


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
