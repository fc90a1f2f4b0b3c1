import sys

import pytest


@pytest.fixture(autouse=True)
def close_optimizers(one_thread):
    """Compute with one thread, and close the optimizers that `replicas.distribute` has made."""
    yield
    if "replicas" in sys.modules:
        sys.modules["replicas"].close_all()
