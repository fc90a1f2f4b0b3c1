"""How studies are called."""

from mpicomp.cli import run_program


def call(study, words):
    """Run a study with these words and return the exit status."""
    return run_program(lambda: study.parser().parse_args(words), study.run)
