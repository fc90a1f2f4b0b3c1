"""Which of pytest-xdist's workers runs what: a file to one worker, and all that start processes to one of them."""

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]
_STARTS = {"cli", "lab", "plugins", "slurm"}  # folders of tests that start processes


@cache
def starts_processes(file):
    """Return whether tests of a file, relative to the root, start processes: side by side they wait for each other."""
    path = ROOT / file
    return bool(_STARTS & set(Path(file).parts)) or (path.is_file() and "mpiexec" in path.read_text())


class ByFile(LoadScopeScheduling):
    """Gives out files in their order, those that start processes as if they were one."""

    def _split_scope(self, nodeid):
        file = nodeid.partition("::")[0]
        return "processes" if starts_processes(file) else file
