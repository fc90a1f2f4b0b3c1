"""``python -m mpicomp``: the command line for environments whose ``bin`` is not on the path."""

import sys

from mpicomp.cli import main

if __name__ == "__main__":
    sys.exit(main())
