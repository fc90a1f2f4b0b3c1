"""Studies that run jobs, without their processes."""

from pathlib import Path


def stand_in(monkeypatch, jobs):
    """Have studies ask this in place of `lab_jobs.execute`, and let them begin here."""
    monkeypatch.setattr("lab_jobs.execute", jobs)
    monkeypatch.setattr("lab_jobs.find_launcher", lambda: Path("/bin/mpiexec"))
    monkeypatch.setattr("lab_jobs.find_mpi", lambda launcher: "mpich")
    monkeypatch.setattr("lab_jobs.check_lab", lambda command: None)
    monkeypatch.setattr("comparison.check_tasks", lambda command: None)
    return jobs
