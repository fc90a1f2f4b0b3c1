"""The script of docs/checkpoint.md stops, and goes on where it stopped."""

import re

import pytest
from tables import DOCS

import mpicomp
from mpicomp.mpi import LocalWorld

SCRIPT = re.search(r"```python\n(.*?)```", (DOCS / "checkpoint.md").read_text(), re.DOTALL)[1]

TORCH = """
import sys
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
MyModel = lambda: torch.nn.Sequential(torch.nn.Linear(3, 20), torch.nn.Dropout(0.5), torch.nn.Linear(20, 2))
loss_of = torch.nn.functional.mse_loss
epochs = int(sys.argv[1])

def my_share_of_the_data(epoch):
    from mpi4py import MPI
    generator = torch.Generator().manual_seed(100 * epoch + MPI.COMM_WORLD.rank)
    for _ in range(3):
        yield torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)
"""


def train(mpiexec, folder, code, ranks, until):
    """Run a script of the page in a folder; give what rank 0 has saved."""
    folder.mkdir(exist_ok=True)
    # Two runs are the same bit for bit where the collective is named.
    code = code.replace('compressor="topk"', 'compressor="topk", collective="allgather"')
    script = folder / "script.py"
    script.write_text(f"import os; os.chdir({str(folder)!r})\n{code}")
    done = mpiexec(ranks, script, until, timeout=100)
    assert done.returncode == 0, done.stderr
    return mpicomp.load_checkpoint(folder / "checkpoints", LocalWorld(1).transports[0])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_pytorch_script(mpiexec, tmp_path):
    torch = pytest.importorskip("torch")
    straight = train(mpiexec, tmp_path / "straight", TORCH + SCRIPT, 2, 4)
    first = train(mpiexec, tmp_path / "stopped", TORCH + SCRIPT, 2, 2)
    assert first["epoch"] == 2
    resumed = train(mpiexec, tmp_path / "stopped", TORCH + SCRIPT, 2, 4)
    assert resumed["epoch"] == straight["epoch"] == 4
    assert first["optimizer"]["mpicomp"]["residuals"]
    for name, tensor in straight["model"].items():
        assert torch.equal(resumed["model"][name], tensor)
    assert any(not torch.equal(first["model"][name], tensor) for name, tensor in straight["model"].items())
