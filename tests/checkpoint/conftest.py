"""A checkpoint to be damaged."""

import numpy as np
import pytest
from checkpoints import save


@pytest.fixture
def two_ranks(tmp_path):
    """Return a folder with a checkpoint of two ranks."""
    folder = tmp_path / "two"
    save(folder, [{"w": np.full(50, rank), "name": f"rank {rank}"} for rank in range(2)])
    return folder
