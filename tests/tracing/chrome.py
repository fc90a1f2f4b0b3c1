"""What a trace in Chrome's format has to be, written from its documentation and from nothing else.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: the object form has ``traceEvents``;
complete events (X) have ``ts`` and ``dur`` in microseconds, ``pid``, ``tid`` and ``name``; slices of one thread nest;
counters (C) have numbers in ``args``; metadata (M) name processes and threads.
"""

import math
from collections import defaultdict

NUMBER = (int, float)
METADATA = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
METADATA |= {"thread_sort_index": "sort_index"}


def check(trace):
    """Raise where a trace is none; return its events by phase."""
    assert isinstance(trace["traceEvents"], list)
    assert trace.get("displayTimeUnit", "ms") in ("ms", "ns")
    kinds = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event.get("args", {}), dict)
        kinds[event["ph"]].append(event)
        if event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"]
            continue
        assert isinstance(event["ts"], NUMBER)
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], NUMBER)
            assert event["dur"] >= 0
        else:
            assert event["ph"] == "C", event
            assert event["args"]
            assert all(isinstance(value, NUMBER) and math.isfinite(value) for value in event["args"].values())
    threads = {(event["pid"], event["tid"]) for event in kinds["M"] if event["name"] == "thread_name"}
    processes = {event["pid"] for event in kinds["M"] if event["name"] == "process_name"}
    tracks = defaultdict(list)
    for event in kinds["X"]:
        assert (event["pid"], event["tid"]) in threads
        assert event["pid"] in processes
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        check_nested(slices)
    return kinds


def check_nested(slices, slack=0.002):
    """Raise where two slices of a thread overlap and neither is inside of the other; rounding is forgiven."""
    open_until = []
    for begin, end in sorted(slices, key=lambda value: (value[0], -value[1])):
        while open_until and open_until[-1] <= begin + slack:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + slack, (begin, end, open_until)
        open_until.append(end)


def names(kinds):
    """Return the names of processes, and those of threads by process and thread."""
    processes = {e["pid"]: e["args"]["name"] for e in kinds["M"] if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in kinds["M"] if e["name"] == "thread_name"}
    return processes, threads
