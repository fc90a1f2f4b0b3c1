"""Benchmarks that run jobs, without their processes."""

from pathlib import Path


def stand_in(monkeypatch, jobs):
    """Have benchmarks ask this in place of `mpicomp.bench.jobs.execute`, and let them begin whatever is installed."""
    monkeypatch.setattr("mpicomp.bench.jobs.execute", jobs)
    monkeypatch.setattr("mpicomp.bench.jobs.find_launcher", lambda: Path("/bin/mpiexec"))
    monkeypatch.setattr("mpicomp.bench.jobs.find_mpi", lambda launcher: "mpich")
    monkeypatch.setattr("mpicomp.bench.networks.check_lab", lambda command: None)
    monkeypatch.setattr("mpicomp.cli.runs.check_tasks", lambda command: None)
    return jobs
