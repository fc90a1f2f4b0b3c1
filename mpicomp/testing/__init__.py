"""The kit: laws that every compressor, collective and policy has to obey, built in or a user's.

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
from mpicomp.testing.collective_laws import exchange
from mpicomp.testing.examples import accumulated, awkward, example, mean_of, pairs

__all__ = ["Check", "accumulated", "awkward", "checks", "example", "exchange", "mean_of", "pairs"]


@dataclass(frozen=True)
class Check:
    """A law for a compressor, collective or policy; a call raises AssertionError if it is broken."""

    law: Callable[[Any], None]
    compressor: Any

    def __call__(self) -> None:
        """Run the check."""
        self.law(self.compressor)

    @property
    def __name__(self) -> str:
        """The law's name, which pytest shows."""
        return self.law.__name__.removeprefix("check_")


def checks(compressor: Compressor | type[Scheme[Any]] | Policy) -> list[Check]:
    """Return the laws of a compressor, a collective or a policy, to be called one by one.

    Parameters
    ----------
    compressor : Compressor, class of a Scheme, or Policy
        An object or, of a collective, the class, which is tried with a built-in compressor of each kind of message
        that it carries. With a ratio near 0.05 all laws have elements to check (see `example`).

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
