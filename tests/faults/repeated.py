"""The compiled part of a decoder, repeated on mutated bytes by a compiled loop: a thousand times as fast as the whole.

While a genuine message is decoded once, all calls of compiled kernels are written down. Those that read what has
arrived, or what one of them has made of it, are then repeated in their order with the same arguments, after each
mutation of the bytes in place. Where a kernel answers no, what would follow is left out, as its caller leaves it out.
Headers are not read again: that lengths and counts are right is for the whole decoder to find out.
"""

import contextlib
import functools
import sys

import numba
import numpy as np
from faults import mutations
from numba.core.dispatcher import Dispatcher

from mpicomp.errors import MpicompError

PRECONDITIONS = ("_split_largest",)
"""Kernels whose callers look at the values first, so that they cannot be called with others."""


class _Listening:
    """Stands in a module where a compiled function was, and writes its calls down."""

    def __init__(self, function, calls):
        self.function, self.calls = function, calls

    def __call__(self, *args):
        result = self.function(*args)
        self.calls.append((self.function, args, isinstance(result, bool | np.bool_)))
        return result


@contextlib.contextmanager
def _heard(calls):
    """Write down the calls of all compiled functions of mpicomp, by whatever name a module has them."""
    changed = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "numba" or name.startswith("faults") or module is None:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, Dispatcher):
                changed.append((module, key, value))
                setattr(module, key, _Listening(value, calls))
    try:
        yield
    finally:
        for module, key, value in changed:
            setattr(module, key, value)


def calls_of(case, message):
    """Return the buffers in which a message arrives, and the calls that read what is there, for each of them."""
    calls = []
    with contextlib.suppress(MpicompError):  # a genuine message may say that its ranks differ
        case.decode(message)  # so that all is compiled
        with _heard(calls):
            case.decode(message)
    buffers = list(case.arrived) or [message]
    return [(buffer, _that_read(buffer, calls)) for buffer in buffers if buffer.size]


def _that_read(buffer, calls):
    reached, found = [buffer], []
    for function, args, answers in calls:
        arrays = [argument for argument in args if isinstance(argument, np.ndarray)]
        if any(np.may_share_memory(array, other) for array in arrays for other in reached):
            if function.__name__ in PRECONDITIONS:
                break
            reached += arrays
            found.append((function, args, answers))
    return found


@functools.cache
def _loop(functions, answers):
    lines = ["def loop(state, pristine, message, count, progress, arguments):", "    ended = 0"]
    lines += ["    for _ in range(count):", "        progress[0] = state[0]"]
    lines += ["        mutate(state, pristine, message, False)"]
    for place, answer in enumerate(answers):
        call = f"kernel_{place}(*arguments[{place}])"
        lines += [f"        if not {call}:", "            continue"] if answer else [f"        {call}"]
    lines += ["        ended += 1", "    message[:] = pristine", "    return ended"]
    space = {f"kernel_{place}": function for place, function in enumerate(functions)}
    exec("\n".join(lines), space | {"mutate": mutations.mutate}, space)
    # The dictionary of globals is the one that Numba looks names up in.
    function = space["loop"]
    function.__globals__.update(space)
    return numba.njit(nogil=True)(function)


def repeat(buffer, calls, state, count, progress):
    """Repeat calls on ``count`` mutations of what is in a buffer; return how often no kernel said no.

    ``progress`` is an array of one number that receives the state before each mutation, so that the message can be
    made again after a crash.
    """
    message = buffer.reshape(-1).view(np.uint8)
    loop = _loop(tuple(function for function, _, _ in calls), tuple(answer for *_, answer in calls))
    arguments = tuple(args for _, args, _ in calls)
    return loop(state, message.copy(), message, count, progress, arguments)
