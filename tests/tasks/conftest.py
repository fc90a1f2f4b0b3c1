import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    """Keep small networks on one thread: torch's others spin, and on a busy machine each step waits for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def numbers(tmp_path_factory):
    """Return the path of a text that is quickly learned."""
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text("".join(f"line {number} of {number % 7} and {number % 11}\n" for number in range(4000)))
    return path
