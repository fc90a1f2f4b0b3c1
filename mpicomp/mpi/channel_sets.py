"""Channels that are handed out together, and which ranks have closed theirs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mpicomp.mpi.channel import Channel
from mpicomp.mpi.rounds import ACROSS, HOST, WORLD

NAMES = (WORLD, HOST, ACROSS)
"""Groups in the order of a set's channels: channel number i of set n has the key ``len(NAMES) * n + i``."""


class Closing(NamedTuple):
    """A rank's notice that it begins no more rounds on a set of channels, or none for one user of it."""

    set_number: int
    generation: int  # times that the set had been handed out
    user: int  # 0 for all
    world: int  # rounds that it had begun on the channel of all ranks
    host: int  # ... of its host
    across: int  # ... across hosts


@dataclass(eq=False)
class ChannelSet:
    """A channel for each group that this rank is in; groups of the same ranks share one."""

    number: int  # the same on all ranks
    channels: dict[str, Channel]  # by the group's name
    free: bool = False  # whether its owner has returned it
    users: set[int] = field(default_factory=set)  # those of now, by numbers that are the same on all ranks
    last_user: int = 0  # the highest of those numbers so far; 0 if there was none
    generation: int = 0  # times that it was handed out

    @property
    def begun(self) -> list[int]:
        """Rounds begun on each channel, which its ranks must have in common before it is used again."""
        return [self.channels[name].begun if name in self.channels else 0 for name in NAMES]

    def progress(self) -> bool:
        """Advance the rounds under way; return whether none is left."""
        return False not in [channel.progress() for channel in self.channels.values()]


class Closings:
    """The other ranks' notices about ``sets``, this rank's by number."""

    def __init__(self, sets: Mapping[int, ChannelSet]) -> None:
        self._sets = sets
        self._notices: dict[tuple[int, int, int], Closing] = {}  # by the other rank, its set and that one's user

    def record(self, rank: int, closing: Closing) -> None:
        """Keep a rank's notice, which may arrive before this rank has made the set or begun its next use."""
        known = self._sets.get(closing.set_number)
        if known is not None and known.generation >= closing.generation:
            retired = 0 < closing.user <= known.last_user and closing.user not in known.users
            if retired or known.generation > closing.generation:
                return
        self._notices[rank, closing.set_number, closing.user] = closing

    def forget(self, set_number: int, user: int) -> None:
        """Drop the notices about a user, 0 for all users, that no round of this rank waits for any more."""
        for rank, number, of_user in list(self._notices):
            if number == set_number and of_user and user in (0, of_user):
                self._notices.pop((rank, number, of_user), None)

    def closed_by(self, key: int, number: int, user: int) -> set[int]:
        """Return the ranks that will not begin this round of a channel and a user."""
        set_number, place = divmod(key, len(NAMES))
        known = self._sets.get(set_number)
        return {
            rank
            for (rank, of_set, of_user), closing in list(self._notices.items())
            if known is not None
            and of_set == set_number
            and of_user in (0, user)
            and closing.generation == known.generation
            and (closing.world, closing.host, closing.across)[place] < number
        }
