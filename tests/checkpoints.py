"""Checkpoints of ranks inside one process, for tests."""

import sys
from pathlib import Path

import numpy as np

from mpicomp.checkpoint import load_rounds, save_rounds
from mpicomp.errors import CheckpointError, MpicompError
from mpicomp.mpi import LocalWorld


def save(folder, states, keep=1):
    world = LocalWorld(len(states))
    world.run(
        [save_rounds(folder, state, keep, end.group) for state, end in zip(states, world.transports, strict=True)]
    )


def load(folder, ranks=1, rows=None):
    """Return one state a rank; of ranks with the same ``rows`` of a model."""
    world = LocalWorld(ranks)
    return world.run([load_rounds(folder, end.group, rows) for end in world.transports])


def caught(asked):
    try:
        yield from asked
    except MpicompError as error:
        return error
    return None


def save_errors(folder, states, keep=1):
    world = LocalWorld(len(states))
    ends = zip(states, world.transports, strict=True)
    return world.run([caught(save_rounds(folder, state, keep, end.group)) for state, end in ends])


def load_errors(folder, ranks, rows=None):
    world = LocalWorld(ranks)
    return world.run([caught(load_rounds(folder, end.group, rows)) for end in world.transports])


def the_one(errors, kind=CheckpointError):
    """Return the text of the one error that all ranks raised."""
    assert {type(error) for error in errors} == {kind}
    (text,) = {str(error) for error in errors}
    return text


def content(folder):
    """Return every file below a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def check_same(left, right):
    """Check that two trees are the same in all types and bits."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert [(type(key), key) for key in left] == [(type(key), key) for key in right]
        for key in left:
            check_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, two in zip(left, right, strict=True):
            check_same(one, two)
    elif isinstance(left, np.ndarray | np.generic):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tobytes() == right.tobytes()
    elif type(left).__name__ == "Tensor":
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert bits(left) == bits(right)
    else:
        assert repr(left) == repr(right)  # NaN is not NaN


def bits(tensor):
    torch = sys.modules["torch"]
    return tensor.resolve_conj().clone(memory_format=torch.contiguous_format).untyped_storage().tolist()


def file_of(folder, rank, number=1):
    return folder / f"checkpoint-{number:08d}" / f"rank-{rank:05d}.safetensors"


def gradients(step, rank, size=20):
    rng = np.random.default_rng((step, rank))
    return {
        "w": rng.normal(size=(size, 3)).astype(np.float32),
        "wide": rng.normal(size=size),
        "one": np.array(rng.normal(), np.float32),
        "empty": np.zeros((0, 2), np.float32),
    }
