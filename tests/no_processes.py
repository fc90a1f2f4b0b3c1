"""Studies that run jobs, without their processes."""

from pathlib import Path


def stand_in(monkeypatch, jobs):
    """Have studies ask this in place of `mpicomp.bench.measure.jobs.execute`, and let them begin here."""
    monkeypatch.setattr("mpicomp.bench.measure.jobs.execute", jobs)
    monkeypatch.setattr("mpicomp.bench.measure.jobs.find_launcher", lambda: Path("/bin/mpiexec"))
    monkeypatch.setattr("mpicomp.bench.measure.jobs.find_mpi", lambda launcher: "mpich")
    monkeypatch.setattr("mpicomp.bench.measure.networks.check_lab", lambda command: None)
    monkeypatch.setattr("comparison.check_tasks", lambda command: None)
    return jobs
