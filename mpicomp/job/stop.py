"""Signals by which a cluster asks a job to stop: this process takes note, and `mpicomp.Reducer` tells the other ranks.

They may come on some ranks alone, and in different steps. The note of one rank travels with the next exchange, after
which all of them know: see `mpicomp.StepRecord`.
"""

import atexit
import signal
import threading

from mpicomp.errors import ConfigurationError

STOPPED = 75  # exit status of a job that was asked to stop and can go on: EX_TEMPFAIL of sysexits.h, "try again"

asked = False  # whether this process was asked to stop; other ranks may not know of it yet


def stop_on_signals(*signals: int) -> None:
    """From now on have these signals ask all ranks to stop after a step, in place of ending the process.

    Call it in the main thread of every rank, best before anything that takes time. It replaces earlier handlers of
    these signals.

    Parameters
    ----------
    *signals : int
        By default SIGTERM and SIGUSR1.

    Raises
    ------
    ConfigurationError
        In another thread than the main one.

    Notes
    -----
    After a step of a `mpicomp.Reducer`, or of an optimizer that has one, ``reducer.last_step.stop`` tells whether some
    rank was asked by then: the same on all ranks of the reducer. A script then saves its state and leaves with the
    status `mpicomp.STOPPED`. A second signal changes nothing, so a rank that hangs has to be killed.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            "stop_on_signals: Python handles signals in the main thread alone; call it there, or have something else "
            "call ask_to_stop()"
        )
    for number in signals or (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: ask_to_stop())
        # Python resets handlers at its end. Once a rank has ended, srun sends the others a SIGTERM, which would
        # turn their status into that of a killed process.
        atexit.register(signal.signal, number, signal.SIG_IGN)


def ask_to_stop() -> None:
    """Ask all ranks to stop after a step, as a signal does; on any rank, at any time, by any thread."""
    global asked
    asked = True
