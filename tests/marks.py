"""Marks for cases of parametrised tests."""

import pytest


def slow(*values):
    """Mark a case as slow: it runs with ``--slow`` only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def once(cases, key=lambda case: case[1]):
    """Keep the first case of each key, a pair's collective if not said otherwise; the others are slow."""
    seen, marked = set(), []
    for case in cases:
        marked.append(slow(*case) if key(case) in seen else case)
        seen.add(key(case))
    return marked
