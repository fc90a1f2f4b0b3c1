"""A Slurm cluster for the tests of the batch templates; a skip with its reason where there can be none."""

import pytest
from slurm.cluster import cluster, reason_without_slurm


@pytest.fixture(scope="session")
def slurm(clean_environ):
    reason = reason_without_slurm()
    if reason is not None:
        pytest.skip(reason)
    with cluster(clean_environ) as running:
        yield running
