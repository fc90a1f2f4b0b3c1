"""A run that was stopped goes on as it was."""

import numpy as np
import pytest

import mpicomp
from mpicomp.errors import ConfigurationError

torch = pytest.importorskip("torch")

from replicas import distribute, network, square  # noqa: E402

torch.set_num_threads(1)


@pytest.mark.mpi
def test_a_run_that_is_resumed_is_the_same_run_bit_for_bit(comm):
    def run(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            square(model, step, comm.rank).backward()
            optimizer.step()

    def make():
        model = network()
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        return model, distribute(model, comm, adam, mpicomp.SIDCo(ratio=0.1), "allgather")

    whole, optimizer = make()
    run(whole, optimizer, range(8))
    optimizer.close()
    first, optimizer = make()
    run(first, optimizer, range(4))
    model_state, state = first.state_dict(), optimizer.state_dict()
    optimizer.close()
    second, optimizer = make()
    second.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    assert optimizer.reducer.state_dict()["step"] == 4
    run(second, optimizer, range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    optimizer.close()


def test_the_state_of_another_model():
    from mpicomp.transport import LocalWorld

    ends = [LocalWorld(1).transports[0] for _ in range(2)]
    model, other = network(), torch.nn.Sequential(torch.nn.Linear(6, 9))
    optimizer = distribute(model, ends[0], compressor="topk", collective="allgather")
    square(model, 0, 0).backward()
    optimizer.step()
    before = optimizer.state_dict()
    strange = distribute(other, ends[1], compressor="topk", collective="allgather")
    square(other, 0, 0).backward()
    strange.step()
    with pytest.raises(
        ConfigurationError, match=r"of another model: .*\(9,\) for '0.bias', and this model has shape \(8,\)"
    ):
        optimizer.load_state_dict(strange.state_dict())
    after = optimizer.state_dict()
    assert all(np.array_equal(before["mpicomp"]["residuals"][n], r) for n, r in after["mpicomp"]["residuals"].items())
    optimizer.load_state_dict({key: value for key, value in before.items() if key != "mpicomp"})
