import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    """Keep small networks on one thread: torch's others spin, and on a busy machine each step waits for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
