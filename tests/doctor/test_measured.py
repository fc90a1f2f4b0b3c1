import pytest

from mpicomp.doctor.measured import Clocks, clock_notes, measure


@pytest.mark.parametrize(
    ("error_s", "difference_s", "notes"), [(0.0, 0.0, 0), (1e-4, 0.9, 0), (1e-4, 12.0, 1), (20.0, 12.0, 0)]
)
def test_wall_clocks(error_s, difference_s, notes):
    found = clock_notes(Clocks(error_s, difference_s))
    assert len(found) == notes
    assert all("12.0 s" in note.what for note in found)


@pytest.mark.mpi(min_size=2)
def test_all_ranks_measure_the_same_link(comm):
    link, clocks = measure(comm)
    assert comm.allgather((link, clocks)) == [(link, clocks)] * comm.size
    assert link.latency_s > 0
    assert link.bytes_per_s > 0
    assert clocks.error_s >= 0
