"""Makes ranks' messages as actors of SimGrid, and prints their seconds: ``/usr/bin/python3 simgrid_actors.py FILE``.

It runs under the Python that SimGrid was built for, which knows nothing of mpicomp. `simulated_by_simgrid` writes the
file, and says what is in it.
"""

import json
import os
import sys
from collections import deque
from itertools import permutations
from typing import Any

from simgrid import Actor, Comm, Engine, Host, LinkInRoute, Mailbox, NetZone, this_actor

Started = tuple[list[Comm], list[Any]]
"""Messages under way, and where they arrive, which has to be kept until they have."""

_WINDOW = 2  # messages in the background that are under way at a time


def main() -> int:
    """Print a line of JSON for each case of a file. Each has a process of its own, since a process has one engine."""
    with open(sys.argv[1], encoding="utf-8") as file:
        content = json.load(file)
    for number, case in enumerate(content["cases"]):
        child = os.fork()
        if child == 0:
            print(json.dumps(_seconds(case, content["settings"])), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            print(f"simgrid_actors: case {number} failed", file=sys.stderr)
            return 1
    return 0


def _seconds(case: dict[str, Any], settings: list[str]) -> float:
    """Return the simulated seconds until the last rank is through."""
    engine = Engine(["simgrid_actors", "--log=root.thresh:warning", *(f"--cfg={setting}" for setting in settings)])
    places = _places(case)
    ended: list[float] = []
    for rank, tasks in enumerate(case["tasks"]):
        Actor.create(str(rank), places[rank], _rank, str(rank), tasks, ended)
    engine.run()
    assert len(ended) == len(case["tasks"]), "ranks wait for each other"
    return max(ended)


def _places(case: dict[str, Any]) -> list[Host]:
    """Return where each rank runs.

    Ranks of a host share its link of full duplex to the switch. What a rank sends to others of its host passes one
    after the other through the rank's memory. SimGrid has one way from a host to itself, so that each rank is a host.
    """
    zone = NetZone.create_full_zone("cluster")
    switch = []
    if case["switch"] is not None:
        switch = [LinkInRoute(zone.create_link("switch", case["switch"]).set_latency(0.0).seal())]
    layout, directions = case["layout"], LinkInRoute.Direction
    latency, bandwidth = case["between"]
    links = [
        zone.create_split_duplex_link(f"link{host}", bandwidth).set_latency(latency / 2).seal()
        for host in range(max(layout) + 1)
    ]
    latency, bandwidth = case["inside"]
    memories = [zone.create_link(f"memory{rank}", bandwidth).set_latency(latency).seal() for rank in range(len(layout))]
    places = [zone.create_host(f"rank{rank}", 1e9) for rank in range(len(layout))]
    for source, target in permutations(range(len(layout)), 2):
        way = [LinkInRoute(memories[source])]
        if layout[source] != layout[target]:
            up = LinkInRoute(links[layout[source]], directions.UP)
            way = [up, *switch, LinkInRoute(links[layout[target]], directions.DOWN)]
        zone.add_route(places[source].netpoint, places[target].netpoint, None, None, way, False)
    zone.seal()
    return places


def _rank(name: str, tasks: list[dict[str, Any]], ended: list[float]) -> None:
    """Make a rank's tasks: ``now``, when all before are done; ``next``, in the window; or in the ``background``."""
    under_way: deque[Started] = deque()
    background: list[Actor] = []
    for place, task in enumerate(tasks):
        steps = task["steps"]
        if task["when"] == "now":
            _wait_for(under_way, background)
            _make(name, steps)
        elif task["when"] == "next":
            if len(under_way) == _WINDOW:
                _wait(under_way.popleft())
            under_way.append(_start(name, steps[0]))
        else:
            background.append(Actor.create(f"{name}.{place}", this_actor.get_host(), _make, name, steps, f".{place}"))
    _wait_for(under_way, background)
    ended.append(Engine.clock)


def _wait_for(under_way: deque[Started], background: list[Actor]) -> None:
    while under_way:
        _wait(under_way.popleft())
    while background:
        background.pop().join()


def _make(name: str, steps: list[Any], lane: str = "") -> None:
    for step in steps:
        _wait(_start(name, step, lane))


def _start(name: str, step: Any, lane: str = "") -> Started:
    """Start a step's messages: those that leave, with their bytes, and those that come."""
    leaving, coming = step
    sent = [Mailbox.by_name(f"{name}-{peer}{lane}").put_async(0, nbytes) for peer, nbytes in leaving]
    received = [Mailbox.by_name(f"{peer}-{name}{lane}").get_async() for peer in coming]
    return sent + [comm for comm, _ in received], [place for _, place in received]


def _wait(started: Started) -> None:
    for comm in started[0]:
        comm.wait()


if __name__ == "__main__":
    sys.exit(main())
