import pytest


@pytest.fixture(scope="module")
def one_thread():
    """Have torch use one thread: several compute other bits."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
