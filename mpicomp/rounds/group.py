"""Groups of ranks: all of them, those of a host, and those with the same place on their hosts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

WORLD, HOST, ACROSS = "world", "host", "across"
"""Names of groups: all ranks; those of one host; those with the same place on their hosts, one a host."""


@dataclass(frozen=True)
class Group:
    """Some ranks, as one of them sees them.

    Parameters
    ----------
    rank, size : int
        This rank's place, and how many there are.
    identical_sums : bool
        Whether the transport's sum has the same bits on every rank.
    name : str
        Which ranks: `WORLD`, `HOST` or `ACROSS`.
    hosts : int
        On how many hosts they are.
    sharing : int
        How many ranks of one host send through its link at a time when groups of this name are at work: for `WORLD`
        the most ranks that a host has, for `ACROSS` the fewest.
    parts : tuple of Group
        The `HOST` group that this rank is in, and its `ACROSS` group if it is in one. They may be left out where
        every rank has a host of its own, or all are on one.
    layout : tuple of int
        The host of each rank, by number; it may be left out where the parts may.
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
        """Return this rank's group of a name, None where it is in none.

        As many ranks of each host are in `ACROSS` groups as the host with the fewest has.
        """
        if name == self.name:
            return self
        for part in self.parts:
            if part.name == name:
                return part
        if self.parts:
            return None
        whole = replace(self, name=name)
        alone = Group(0, 1, name=name)
        return whole if (name == HOST) == (self.hosts == 1) else alone


def layout_groups(
    layout: Sequence[int], rank: int, identical_sums: bool = True
) -> tuple[Group, dict[str, tuple[int, ...]]]:
    """Return the group of all ranks, as one of them sees it, and who is in its groups.

    Parameters
    ----------
    layout : sequence of int
        The host of each rank, by number.
    rank : int
        The rank from whose view the group is described.
    identical_sums : bool
        See `Group`.

    Returns
    -------
    Group
        With its parts.
    dict of str to tuple of int
        The ranks in each group that this rank is in, ascending; one's place is that in its group.

    Examples
    --------
    >>> group, members = layout_groups([0, 0, 1, 1, 1], rank=2)
    >>> members["host"], members["across"]
    ((2, 3, 4), (0, 2))
    >>> group.hosts, group.sharing, group.part("across").rank
    (2, 3, 1)
    >>> layout_groups([0, 0, 1, 1, 1], rank=4)[0].part("across") is None
    True
    """
    on_host: dict[int, list[int]] = {}
    for other, where in enumerate(layout):
        on_host.setdefault(where, []).append(other)
    owners = min(len(ranks) for ranks in on_host.values())
    value = on_host[layout[rank]]
    place = value.index(rank)
    members = {WORLD: tuple(range(len(layout))), HOST: tuple(value)}
    parts = [Group(place, len(value), identical_sums, HOST)]
    if place < owners:
        members[ACROSS] = tuple(sorted(ranks[place] for ranks in on_host.values()))
        across = members[ACROSS]
        parts.append(Group(across.index(rank), len(across), identical_sums, ACROSS, len(on_host), owners))
    most = max(len(ranks) for ranks in on_host.values())
    world = Group(rank, len(layout), identical_sums, WORLD, len(on_host), most, tuple(parts), tuple(layout))
    return world, members


def parts_of(numel: int, size: int) -> list[int]:
    """Cut ``numel`` elements into ``size`` parts that differ by at most one element.

    Examples
    --------
    >>> parts_of(10, 4), parts_of(1, 3)
    ([3, 3, 2, 2], [1, 0, 0])
    """
    least, more = divmod(numel, size)
    return [least + 1] * more + [least] * (size - more)
