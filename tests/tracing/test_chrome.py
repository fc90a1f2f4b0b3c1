"""The validator itself finds what is wrong."""

import copy

import pytest
from tracing.chrome import check, check_nested

GOOD = {
    "traceEvents": [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "step"}},
        {"name": "a", "ph": "X", "ts": 1.0, "dur": 5.0, "pid": 0, "tid": 1},
        {"name": "b", "ph": "X", "ts": 2.0, "dur": 1.0, "pid": 0, "tid": 1},
        {"name": "c", "ph": "C", "ts": 2.0, "pid": 0, "tid": 0, "args": {"sent": 1}},
    ]
}
WRONG = {
    "overlap": (3, {"dur": 7.0}),
    "negative": (3, {"dur": -1.0}),
    "no time": (2, {"ts": None}),
    "no thread": (2, {"tid": 9}),
    "no process": (2, {"pid": 1}),
    "a word": (4, {"args": {"sent": "1"}}),
    "another phase": (2, {"ph": "Q"}),
}


def test_checker_accepts_a_good_trace():
    assert {kind: len(events) for kind, events in check(GOOD).items()} == {"M": 2, "X": 2, "C": 1}


@pytest.mark.parametrize("name", WRONG)
def test_checker_refuses_a_wrong_trace(name):
    bad = copy.deepcopy(GOOD)
    place, change = WRONG[name]
    bad["traceEvents"][place] |= change
    with pytest.raises((AssertionError, KeyError)):
        check(bad)


def test_checker_accepts_adjacent_slices():
    check_nested([(0, 5), (5, 7), (5, 6), (6, 7)])
    with pytest.raises(AssertionError):
        check_nested([(0, 5), (4, 7)])
