"""Run the tests that docs/sharp-bits.md names, several times each, with the limits that the table promises.

    python tests/faults/rows.py [--repeat 3] [--ranks 2,3,4] [-k WORD]

Every test has three times the seconds of its row's third column, and what Python needs to start. Parallel tests run
under ``mpiexec`` with each number of ranks; the serial ones start their jobs themselves.
"""

import argparse
import collections
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import run

TABLE = run.ROOT / "docs" / "sharp-bits.md"
START_S = 60  # of a job on a busy machine, with kernels that are not compiled yet


def rows(text: str) -> list[tuple[str, float, list[str]]]:
    """Return fault, seconds and tests of each row of the page's tables."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 4 and "::" in cells[3]:
            found.append((cells[0], float(cells[2]), re.findall(r"`([^`]+::[^`]+)`", cells[3])))
    return found


def main() -> int:
    """Run what was asked for and return the exit status."""
    parser = argparse.ArgumentParser(
        description="Run the tests of each fault within the seconds that the page promises."
    )
    parser.add_argument("--repeat", type=int, default=3, help="how many times")
    parser.add_argument("--ranks", default="2,3,4", help="numbers of ranks of parallel tests, with commas")
    parser.add_argument("-k", metavar="WORD", default="", help="only rows with this word")
    arguments = parser.parse_args()
    by_limit: dict[float, set[str]] = collections.defaultdict(set)
    for fault, seconds, tests in rows(TABLE.read_text()):
        if arguments.k in fault:
            by_limit[3 * seconds + START_S] |= set(tests)
    total: collections.Counter[str] = collections.Counter()
    for limit_s, tests in sorted(by_limit.items()):
        options = ["--slow", f"--timeout={limit_s:.0f}", *sorted(tests)]
        for _ in range(arguments.repeat):
            total += run.pytest(["-m", "not mpi", *options], 50 * limit_s)
            total += run.parallel(["-m", "mpi", *options], arguments.ranks)
    print(f"{total['passed']} passed, {total['failed']} failed", flush=True)
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
