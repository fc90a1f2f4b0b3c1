"""Comparison of the ranks' arrays and settings, before anything is delivered: in the first step, and after changes."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mpicomp import errors, plugins
from mpicomp.arrays import ArraySpec
from mpicomp.cost import CostModel
from mpicomp.errors import ConfigurationError, DisagreementError, MessageError, MpicompError, OutOfMemoryError
from mpicomp.mpi import Transport
from mpicomp.mpi.rounds import Group, Round, Rounds, checked_lengths, gather_rows, read_object
from mpicomp.policies import Policy

Made = TypeVar("Made")

_BYTE = np.dtype(np.uint8)
_LOADED = "whether a state was loaded"
_LOAD_ADVICE = (
    "each rank loads a state of its own; where one rank alone loads an optimizer's, call "
    "mpicomp.torch.broadcast_optimizer_state(optimizer) afterwards, or let residuals start at zero there, too: del "
    'state["mpicomp"] before load_state_dict()'
)


@dataclass(frozen=True)
class Signature:
    """The reducer's settings and its arrays in order, which have to be the same on all ranks."""

    settings: dict[str, Any]
    members: list[ArraySpec]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able form that is equal where signatures are."""
        arrays = [[member.name, member.dtype, member.shape] for member in self.members]
        return {"settings": self.settings, "arrays": arrays}


@dataclass(frozen=True)
class LoadedState:
    """The part of a loaded state that ranks compare at the next step, before a policy continues from it."""

    step: int
    policy: Mapping[str, Any]
    cost: CostModel | None

    def load_into(self, policy: Policy, group: Group) -> None:
        """Let a policy continue from it; a state of another policy raises `ConfigurationError` and changes nothing."""
        before = policy.state_dict()
        cost = None if self.cost is not None and self.cost.network.hosts != group.hosts else self.cost
        try:
            policy.load_state_dict(self.policy, cost)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            policy.load_state_dict(before, None)
            raise ConfigurationError(
                f"reducer: the loaded state was not saved by policy '{policy.id}' ({type(error).__name__}: {error}); "
                "delete state['policy'] to begin without"
            ) from error


def settings_of_state(state: LoadedState, is_loaded: bool, is_applied: bool) -> dict[str, Any]:
    """Return the part of the state before a step that ranks compare."""
    text = json.dumps(state.policy, sort_keys=True, default=str)
    return {
        "the step that follows": state.step,
        "values that the policy learned": hashlib.blake2b(text.encode(), digest_size=4).hexdigest(),
        _LOADED: is_loaded,
        "whether the last step was applied": is_applied,
        "plugins": ", ".join(plugins.loaded()) or "none",
    }


def agree(
    signature: Signature | None, problem: MpicompError | None, group: Group, subsystem: str = "reduce"
) -> Rounds[None]:
    """Compare the ranks' signatures and raise the same error on all of them if they differ.

    ``signature`` is None if this rank's arrays cannot be described, ``problem`` is this rank's error, and ``subsystem``
    the start of messages. A `DisagreementError` names the first difference, with ranks and values; it is reported
    first, since it mostly explains other errors. A problem of some rank is raised on all, with its class. Reports that
    cannot be read raise `MessageError`.
    """
    report = report_of(signature, problem)
    yield from compare(report, digest_round(report, problem is not None, group), group, subsystem)


def report_of(signature: Signature | None, problem: MpicompError | None) -> bytes:
    """Return a rank's signature, or its error, as ranks exchange them."""
    content: dict[str, Any] = {} if signature is None else signature.to_json()
    if problem is not None:
        content |= {"error": type(problem).__name__, "message": str(problem)}
    return json.dumps(content, sort_keys=True).encode()


def digest_round(report: bytes, is_wrong: bool, group: Group) -> Round:
    """Return the round in which ranks exchange the digests of their reports."""
    digest = np.frombuffer(hashlib.blake2b(report, digest_size=16).digest() + bytes([is_wrong]), _BYTE)
    received = np.empty(group.size * digest.size, _BYTE)
    return Round("allgatherv", [digest.size] * group.size, _BYTE, send=digest, recv=received)


def compare(report: bytes, digests: Round, group: Group, subsystem: str) -> Rounds[None]:
    """Compare the ranks' reports as `agree` does, by a round of `digest_round`. As rounds."""
    digest, received = digests.send, (yield digests)
    assert digest is not None
    if not digest[-1] and received.tobytes() == group.size * digest.tobytes():
        return
    counts = checked_lengths((yield from gather_rows(np.int64(len(report)), group)), subsystem)
    if counts[group.rank] != len(report):
        raise MessageError(f"{subsystem}: a report of {len(report)} bytes is taken for one of {counts[group.rank]}")
    send, recv = np.frombuffer(report, _BYTE), np.empty(sum(counts), np.uint8)
    everything = yield Round("allgatherv", counts, _BYTE, send=send, recv=recv)
    bounds = np.concatenate(([0], np.cumsum(counts)))
    parts = [everything[bounds[rank] : bounds[rank + 1]] for rank in range(group.size)]
    reports = [read_object(part, subsystem, rank) for rank, part in enumerate(parts)]
    try:
        found = _difference(reports, subsystem)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise MessageError(f"{subsystem}: a report of a rank is no signature ({error!r:.200})") from None
    raise found


def run_collectively(
    make: Callable[[], Made], transport: Transport, subsystem: str, compared: Callable[[Made], Signature] | None = None
) -> Made:
    """Return the result of ``make``, or raise any rank's error, or that ``compared`` differs, on all. Collective."""
    problem: MpicompError | None = None
    try:
        made = make()
    except MpicompError as error:
        problem = error
    except MemoryError as error:
        problem = no_memory(error, subsystem)
    except BaseException as error:
        transport.abort_exchange(error)
        raise
    if transport.concurrent and transport.group.size > 1:
        signature = None if problem is not None or compared is None else compared(made)
        transport.run(agree(signature, problem, transport.group, subsystem))
    if problem is not None:
        raise problem
    return made


def no_memory(error: MemoryError, subsystem: str) -> OutOfMemoryError:
    """Return an error that all ranks can raise."""
    return OutOfMemoryError(
        f"{subsystem}: no memory is left for the buckets and residuals of this rank ({error or 'of unknown size'}); "
        "start fewer ranks on its host or GPU, or raise its limit"
    )


def _difference(reports: list[dict[str, Any]], subsystem: str) -> MpicompError:
    described = [rank for rank, report in enumerate(reports) if "arrays" in report]
    for rank in described[1:]:
        text = _compare(reports[described[0]], reports[rank], described[0], rank)
        if text is not None:
            return DisagreementError(f"{subsystem}: {text}")
    wrong = [rank for rank, report in enumerate(reports) if "error" in report]
    if wrong:
        first = reports[wrong[0]]
        where = "" if len(wrong) == len(reports) else f" (on {_ranks(wrong)})"
        cls = getattr(errors, first["error"], MpicompError)
        known = isinstance(cls, type) and issubclass(cls, MpicompError)
        return error_of(cls if known else MpicompError, first["message"] + where)
    return DisagreementError(f"{subsystem}: the ranks were passed different arguments")


def _compare(ours: dict[str, Any], theirs: dict[str, Any], first: int, rank: int) -> str | None:
    for key, value in sorted(ours["settings"].items(), key=lambda item: item[0] != _LOADED):  # which explains others
        if value != theirs["settings"][key]:
            other = theirs["settings"][key]
            text = f"{key} must be the same on all ranks, got {value} on rank {first} and {other} on rank {rank}"
            are_loaded = ours["settings"].get(_LOADED), theirs["settings"].get(_LOADED)
            return text if are_loaded[0] == are_loaded[1] else f"{text}; {_LOAD_ADVICE}"
    left = {array[0]: array for array in ours["arrays"]}
    right = {array[0]: array for array in theirs["arrays"]}
    for name in [*left, *right]:
        if name not in left or name not in right:
            here, there = (first, rank) if name in left else (rank, first)
            return f"all ranks must pass the same names; '{name}' is on rank {here} but not on rank {there}"
        for field, place in (("dtype", 1), ("shape", 2)):
            mine, other = left[name][place], right[name][place]
            if mine != other:
                got = f"got {mine} on rank {first} and {other} on rank {rank}"
                return f"'{name}' must have the same {field} on all ranks, {got}"
    for place, (mine, other) in enumerate(zip(left, right, strict=True)):
        if mine != other:
            got = f"got '{mine}' on rank {first} and '{other}' on rank {rank}"
            return f"names must come in the same order on all ranks, {got} at place {place}"
    return None


def error_of(cls: type[MpicompError], message: str) -> MpicompError:
    """Make an error of a class without its constructor, which may require more than the message."""
    error = cls.__new__(cls, message)
    error.args = (message,)
    return error


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


GradientInput = tuple[Mapping[str, Any], Collection[str]]
"""Arrays by name, and the names that stand for no gradient; see `mpicomp.Reducer.reduce`."""


class Checks:
    """Agreements of ranks that a caller adds to a step, such as comparisons of replicas; by default there are none."""

    stale = False  # whether ranks must compare arrays and settings in this step, for a reason that arrays do not show
    idle = False  # whether this rank has no gradients: its arrays are absent, and do not become conditional for that
    frozen = False  # whether some rank is idle, the same on all ranks: policies then keep their plans and learn nothing

    def agree(self, given: GradientInput) -> Rounds[GradientInput | None]:
        """Compare the caller's state; return the gradients to reduce, or None to end the step. As rounds."""
        return given
        yield

    def laid_out(self) -> None:
        """Move arrays into new buckets, where these hold gradients, before they are read."""

    def finish(self, finite: bool) -> Rounds[bool]:
        """Check the step after its exchanges; return whether it is finite, the same on all ranks. As rounds."""
        return finite
        yield

    def restart(self) -> None:
        """Forget this rank's counts and rounds: at a death ranks leave a step at different places."""


NO_CHECKS: Checks = Checks()
