"""Groups of ranks: all, those of a host, and those with the same place on their hosts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

WORLD, HOST, ACROSS = "world", "host", "across"
"""Names of groups: all ranks; those of one host; one rank a host, with the same place on each."""


@dataclass(frozen=True)
class Group:
    """Some ranks, as one of them sees them.

    Parameters
    ----------
    rank, size : int
        This rank's place, and the number of ranks.
    identical_sums : bool
        Whether the transport's sum has the same bits on every rank.
    name : str
        `WORLD`, `HOST` or `ACROSS`.
    hosts : int
        Number of their hosts.
    sharing : int
        Number of ranks of a host that send through its link at a time in rounds of groups of this name: for `WORLD` the
        most ranks of a host, for `ACROSS` the fewest.
    parts : tuple of Group
        This rank's `HOST` group, and its `ACROSS` group if it is in one. Optional if each rank has its own host, or all
        are on one.
    layout : tuple of int
        The number of each rank's host; optional if the parts are.
    """

    rank: int
    size: int
    identical_sums: bool = True
    name: str = WORLD
    hosts: int = 1
    sharing: int = 1
    parts: tuple["Group", ...] = ()
    layout: tuple[int, ...] = ()

    def seen_by(self, rank: int) -> "Group":
        """Return this group of all ranks as another rank sees it."""
        if self.layout:
            return layout_groups(self.layout, rank, self.identical_sums)[0]
        return replace(self, rank=rank)

    def part(self, name: str) -> "Group | None":
        """Return this rank's group of a name, or None; of each host as many ranks are in `ACROSS` groups."""
        if name == self.name:
            return self
        for part in self.parts:
            if part.name == name:
                return part
        if self.parts:
            return None
        return replace(self, name=name) if (name == HOST) == (self.hosts == 1) else Group(0, 1, name=name)


def layout_groups(
    layout: Sequence[int], rank: int, identical_sums: bool = True
) -> tuple[Group, dict[str, tuple[int, ...]]]:
    """Return the group of all ranks, as one rank sees it, and the ranks in each of its groups, ascending.

    >>> group, members = layout_groups([0, 0, 1, 1, 1], rank=2)
    >>> members["host"], members["across"]
    ((2, 3, 4), (0, 2))
    >>> group.hosts, group.sharing, group.part("across").rank
    (2, 3, 1)
    >>> layout_groups([0, 0, 1, 1, 1], rank=4)[0].part("across") is None
    True
    """
    on_host: dict[int, list[int]] = {}
    for other, host in enumerate(layout):
        on_host.setdefault(host, []).append(other)
    owners = min(len(ranks) for ranks in on_host.values())
    neighbours = on_host[layout[rank]]
    place = neighbours.index(rank)
    members = {WORLD: tuple(range(len(layout))), HOST: tuple(neighbours)}
    parts = [Group(place, len(neighbours), identical_sums, HOST)]
    if place < owners:
        members[ACROSS] = tuple(sorted(ranks[place] for ranks in on_host.values()))
        across = members[ACROSS]
        parts.append(Group(across.index(rank), len(across), identical_sums, ACROSS, len(on_host), owners))
    most = max(len(ranks) for ranks in on_host.values())
    world = Group(rank, len(layout), identical_sums, WORLD, len(on_host), most, tuple(parts), tuple(layout))
    return world, members


def parts_of(numel: int, size: int) -> list[int]:
    """Cut ``numel`` elements into ``size`` parts that differ by at most one element.

    >>> parts_of(10, 4), parts_of(1, 3)
    ([3, 3, 2, 2], [1, 0, 0])
    """
    least, more = divmod(numel, size)
    return [least + 1] * more + [least] * (size - more)
