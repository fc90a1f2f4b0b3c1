"""What a step's record says was sent is what was handed to MPI in it, whatever it was for."""

import numpy as np
import pytest
import torch
from counted import Count
from replicas import batch, distribute

import mpicomp


class Mixed(torch.nn.Module):
    """An embedding, a part that is used now and then, and one that is unfrozen later."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.words = torch.nn.Embedding(40, 3)
        self.trunk = torch.nn.Linear(6, 3)
        self.branch = torch.nn.Linear(3, 3)
        self.late = torch.nn.Linear(3, 5)
        self.late.requires_grad_(False)

    def loss(self, step, rank):
        tokens = torch.from_numpy(np.random.default_rng((step, rank)).integers(0, 40, (4, 2 + rank)))
        hidden = self.trunk(batch(step, rank)) + self.words(tokens).mean(1)
        if (step + rank) % 3 == 1:
            hidden = self.branch(hidden)
        return self.late(hidden).square().sum()


@pytest.mark.mpi(max_size=3)
@pytest.mark.parametrize(("overlap", "policy"), [(True, "static"), (False, "accordion")])
def test_the_record_has_all_bytes(comm, monkeypatch, policy, overlap):
    count = Count(monkeypatch)
    model = Mixed()
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    compressor = mpicomp.TopK(ratio=0.2)
    optimizer = distribute(
        model, comm, plain, compressor, "allgather", policy=policy, overlap=overlap, nonfinite="skip"
    )
    agreed = []
    for step in range(9):
        if step == 5:
            model.late.requires_grad_(True)
        optimizer.zero_grad()
        loss = model.loss(step, comm.rank)
        if step == 7 and comm.rank == comm.size - 1:
            loss = loss * torch.nan
        loss.backward()
        optimizer.step()
        record = optimizer.reducer.last_step
        sent, wire = count.take()
        assert record.step == step
        # New buckets begin with what rank 0 broadcasts about cost models, which is in no sum.
        once = record.once_wire_bytes
        assert not once or step in (0, 5)
        assert record.sent_bytes + (comm.rank == 0 and once and round(once * comm.size / (comm.size - 1))) == sent
        assert record.wire_bytes + once == pytest.approx(wire, rel=1e-12)
        assert record.skipped == (step == 7)
        agreed.append(record.agreed)
    assert agreed[0]
    assert agreed[5]
    assert not all(agreed)
