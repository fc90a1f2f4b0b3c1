"""The blocks of Python on the pages run, each by itself, among things of the names that it takes for granted."""

import json
import re

import pytest
from tables import DOCS

# Pages whose blocks other tests run, or that need a GPU.
ELSEWHERE = {
    "checkpoint": "tests/docs/test_checkpoint.py",
    "policies": "tests/docs/test_policies.py",
    "extending": "tests/plugins/test_plugin_examples.py",
    "gpu": "a GPU",
}
# Blocks that need more than this test has: another package, a training.
LEFT_OUT = ("train()", "SummaryWriter")


DRIVER = """
import json, os, sys
import numpy as np
from mpi4py import MPI
import torch
import mpicomp
import mpicomp.torch
from torch.utils.data import DataLoader

comm, folder = MPI.COMM_WORLD, sys.argv[1]
os.makedirs(f"{folder}/{comm.rank}")
os.chdir(f"{folder}/{comm.rank}")
store = torch.distributed.FileStore(f"{folder}/store", comm.size)
torch.distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
open("m.jsonl", "w").write(json.dumps({"wire_bytes": 1, "dense_wire_bytes": 2}))

for block in json.load(open(f"{folder}/blocks.json")):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    loss_of = torch.nn.functional.mse_loss
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(5)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "DistributedOptimizer(" not in block:
        optimizer = mpicomp.torch.DistributedOptimizer(optimizer, model.named_parameters())
    names = {
        "torch": torch, "mpicomp": mpicomp, "np": np, "DataLoader": DataLoader, "data": [1, 2, 3],
        "model": model, "module": model, "loss_of": loss_of, "batches": batches, "window": 2, "optimizer": optimizer,
        "ones": np.ones(3, np.float32), "twos": 2 * np.ones(3, np.float32), "gradient": np.ones(3, np.float32),
        "field": np.ones(3),
        "loss": loss_of(model(batches[0][0]), batches[0][1]), "reducer": mpicomp.Reducer("topk", policy={"warmup": 0}),
    }
    exec(block, names)
    comm.Barrier()
if comm.rank == 0:
    print("all", flush=True)
"""


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_block_runs(mpiexec, tmp_path):
    pytest.importorskip("torch")
    pages = [page for page in sorted(DOCS.glob("*.md")) if page.stem not in ELSEWHERE]
    found = [block for page in pages for block in blocks(page) if not any(words in block for words in LEFT_OUT)]
    assert len(found) > 10
    (tmp_path / "blocks.json").write_text(json.dumps(found))
    done = mpiexec(2, "-c", DRIVER, tmp_path, timeout=250)
    assert done.stdout.endswith("all\n"), done.stderr
