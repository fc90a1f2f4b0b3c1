"""Printed text is compared with tests/golden/COMMAND.txt; ``GOLDEN=write pytest ...`` writes the file."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check_golden(command, text):
    """Compare what a command prints with its file, trailing spaces aside."""
    printed = "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"
    file = FOLDER / f"{command}.txt"
    if os.environ.get("GOLDEN") == "write":
        FOLDER.mkdir(exist_ok=True)
        file.write_text(printed)
    assert printed == file.read_text()
