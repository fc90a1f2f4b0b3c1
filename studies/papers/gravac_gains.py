"""Three readings of GraVAC's gain, measured in the same training: of its text, of its code, and of gradients alone.

The text has ``||g_c||^2 / ||g_ef||^2``, both with the residual. The code divides plain norms, summed over layers: that
of what is sent, in which residuals are, by that of the gradient, in which they are not.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import paper_runs
from mpicomp.bench.tasks import get_task
from numpy.typing import NDArray
from study_rows import SharedModel

FACTORS = (10, 20, 40, 160, 1000)  # what the paper's exponential rule tries from 10x to 1000x

Layers = Sequence[NDArray[np.float32]]


def train(task_name: str, factor: int, ranks: int, steps: int, seed: int = 0) -> dict[str, Any]:
    """Train with top-k of each layer and error feedback, as the paper's code has it; return means of the last third."""
    import paper_tasks  # noqa: F401, registers tasks

    shared = SharedModel(get_task(task_name, seed), steps)
    shapes = {name: tuple(parameter.shape) for name, parameter in shared.parameters.items()}
    residuals = [[np.zeros(shape, np.float32) for shape in shapes.values()] for _ in range(ranks)]
    found = []
    for step in range(steps):
        sums = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        gains = []
        for rank in range(ranks):
            shared.backward(step, rank, ranks)
            sent = compress(list(shared.gradients().values()), residuals[rank], factor)
            gains.append(sent["gains"])
            for total, layer in zip(sums.values(), sent["layers"], strict=True):
                total += layer / ranks
        shared.set_gradients(sums)
        shared.updater.update()
        found.append({name: fmean(of_rank[name] for of_rank in gains) for name in gains[0]})
    late = found[2 * steps // 3 :]
    return {name: fmean(of_step[name] for of_step in late) for name in late[0]} | {"quality": shared.quality()}


def compress(gradient: Layers, residual: Layers, factor: int) -> dict[str, Any]:
    """Select from each layer, leave the rest in the residual, and return what is sent and the three gains of a rank.

    >>> import numpy as np
    >>> gradient, residual = [np.float32([3, 0, 0, 4])], [np.float32([0, 0, 5, 0])]
    >>> {name: round(gain, 2) for name, gain in compress(gradient, residual, 4)["gains"].items()}
    {'text': 0.5, 'code': 1.0, 'alone': 0.64}
    >>> residual[0].tolist()
    [3.0, 0.0, 0.0, 4.0]
    """
    sent, energies, norms = [], [0.0] * 4, [0.0] * 2
    for plain, left in zip(gradient, residual, strict=True):
        whole = plain + left
        selected, alone = _largest(whole, factor), _largest(plain, factor)
        left[...] = whole - selected
        sent.append(selected)
        for place, array in enumerate((selected, whole, alone, plain)):
            energies[place] += float(np.square(array).sum())
        for place, array in enumerate((selected, plain)):
            norms[place] += float(np.linalg.norm(array))
    text, alone_gain = energies[0] / energies[1], energies[2] / energies[3]
    return {"layers": sent, "gains": {"text": text, "code": norms[0] / norms[1], "alone": alone_gain}}


def _largest(array: NDArray[np.float32], factor: int) -> NDArray[np.float32]:
    """Return an array whose largest elements alone are left, one in ``factor``."""
    flat = array.ravel()
    count = max(1, flat.size // factor)
    places = np.argpartition(np.abs(flat), -count)[-count:]
    kept = np.zeros_like(flat)
    kept[places] = flat[places]
    return kept.reshape(array.shape)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print those rows that are of gains."""
    lines = []
    gains = [row for row in rows if row["table"] == "gains"]
    for (task, name), same in paper_runs.grouped(gains, "task", "name").items():
        means = {key: paper_runs.of_seeds([row[key] for row in same], ".2f") for key in ("text", "code", "alone")}
        quality = paper_runs.of_seeds([row["quality"] for row in same])
        lines.append({"task": task, "name": name, "seeds": len(same), **means, "quality": quality})
    paper_runs.show("Gains at fixed factors, in the last third of the steps", lines, {
        "task": "", "name": "", "seeds": "d", "text": "", "code": "", "alone": "", "quality": "",
    }, [
        "text: squared norms of what is sent and of the gradient with the residual; code: sums of layers' norms, of "
        "what is sent and of the gradient without the residual; alone: squared norms, without residuals in either",
        "top-k of each layer; a step takes a factor where the gain is 0.7 or more; means over seeds, with the range",
    ])  # fmt: skip
