import importlib.util
import sys

import pytest

if importlib.util.find_spec("torch") is None:  # else every file here imports it
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="module")
def _end_groups():
    yield
    if "sharded_models" in sys.modules:
        sys.modules["sharded_models"].end_groups()


@pytest.fixture(autouse=True)
def close_optimizers(one_thread):
    """Compute with one thread, and close the optimizers that `replicas.distribute` has made."""
    yield
    if "replicas" in sys.modules:
        sys.modules["replicas"].close_all()
