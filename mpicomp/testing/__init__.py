"""The kit: laws that every compressor, collective and policy has to obey, built in or of a user.

With pytest, a test for each law::

    from mpicomp.testing import checks

    @pytest.mark.parametrize("check", checks(MyCompressor(ratio=0.05)))
    def test_my_compressor(check):
        check()

Without it, call them one by one. Ranks live in one process; no MPI is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpicomp.collectives import Scheme
from mpicomp.compressors import Compressor
from mpicomp.errors import ConfigurationError
from mpicomp.policies import Policy
from mpicomp.testing import collective_laws, compressor_laws, policy_laws
from mpicomp.testing.compressor_laws import (
    check_awkward_arrays,
    check_bad_gradients_are_undone,
    check_configuration,
    check_feedback_contracts,
    check_input_is_left_alone,
    check_memory,
    check_message,
    check_nothing_is_lost,
    check_packing,
    check_positions,
    check_selection,
    check_unbiased,
)
from mpicomp.testing.examples import example
from mpicomp.testing.local_ranks import accumulated, awkward

__all__ = [
    "Check",
    "accumulated",
    "awkward",
    "check_awkward_arrays",
    "check_bad_gradients_are_undone",
    "check_compressor",
    "check_configuration",
    "check_feedback_contracts",
    "check_input_is_left_alone",
    "check_memory",
    "check_message",
    "check_nothing_is_lost",
    "check_packing",
    "check_positions",
    "check_selection",
    "check_unbiased",
    "checks",
    "example",
]


@dataclass(frozen=True)
class Check:
    """One law for one compressor, collective or policy: call it, and it raises AssertionError where that is broken."""

    law: Callable[[Any], None]
    compressor: Any

    def __call__(self) -> None:
        """Run it."""
        self.law(self.compressor)

    @property
    def __name__(self) -> str:
        """The law's name, which pytest shows."""
        return self.law.__name__.removeprefix("check_")


def checks(compressor: Compressor | type[Scheme[Any]] | Policy) -> list[Check]:
    """Return the laws that hold for a compressor, a collective or a policy, to be called one by one.

    Parameters
    ----------
    compressor : Compressor, class of a Scheme, or Policy
        A compressor or a policy is an object; with a ratio near 0.05 all laws have something to look at (see
        `example`). A policy is asked for its configuration and never adopted. A collective is a class, and is tried
        with a built-in compressor of each kind of message that it carries.

    Examples
    --------
    >>> import mpicomp
    >>> [check.__name__ for check in checks(mpicomp.TopK(ratio=0.05))]
    ['configuration', 'selection', 'awkward_arrays', 'input_is_left_alone', 'message', 'memory', 'nothing_is_lost', \
'feedback_contracts', 'bad_gradients_are_undone']
    """
    if isinstance(compressor, Compressor):
        laws = compressor_laws.laws_of(compressor)
    elif isinstance(compressor, type) and issubclass(compressor, Scheme):
        laws = collective_laws.LAWS
    elif isinstance(compressor, Policy):
        laws = policy_laws.LAWS
    else:
        raise ConfigurationError(
            f"testing: checks are for a compressor, a collective's class or a policy, got {compressor!r}"
        )
    return [Check(law, compressor) for law in laws]


def check_compressor(compressor: Compressor) -> None:
    """Check every law of `checks`, in order.

    Raises
    ------
    AssertionError
        At the first law that is broken, with the result and the array.

    Examples
    --------
    >>> import mpicomp
    >>> check_compressor(mpicomp.TopK(ratio=0.05))
    """
    for check in checks(compressor):
        check()
