"""The base class of optimizers that exchange other things than gradients, or exchange gradients in their own way."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch

from mpicomp.errors import ConfigurationError
from mpicomp.reducer import Reducer
from mpicomp.reducer.agreement import together
from mpicomp.rounds import Asked
from mpicomp.torch.states import name_of, to_arrays, to_tensors
from mpicomp.torch.wrapped import Uncopied
from mpicomp.transport.connect import connect

Params = Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]


class Exchanging(Uncopied, torch.optim.Optimizer):
    """An optimizer whose step is an exchange. A subclass gives `rounds` and puts its reducers into ``reducers``.

    Creating one and `step` are collective.

    Parameters
    ----------
    params : iterable
        Parameters, (name, parameter) pairs or parameter groups with either. Without a name a parameter goes by its
        number.
    defaults : dict
        Settings of groups that do not say otherwise.
    check : callable
        Raises `ConfigurationError` where a setting cannot be; it is raised on all ranks then.
    comm : mpi4py.MPI.Comm, Transport or None
        A communicator is duplicated. None stands for MPI.COMM_WORLD.

    Attributes
    ----------
    reducers : dict of str to Reducer
        All on one transport.
    steps : int
        Number of steps made so far.
    """

    # A GradScaler leaves step() out where this rank's gradients overflowed, and the others would wait for it. With this
    # it calls step() on all of them, after it has set ``found_inf``.
    _step_supports_amp_scaling = True

    def __init__(self, params: Params, defaults: dict[str, Any], check: Callable[[], None], comm: Any) -> None:
        self.reducers: dict[str, Reducer] = {}
        self.steps = 0
        self._names: dict[torch.Tensor, str] = {}
        self._transport = connect(comm)
        self._owned = self._transport is not comm

        def make() -> None:
            check()
            super(Exchanging, self).__init__(params, defaults)

        try:
            together(make, self._transport, type(self).__name__)
        except BaseException:
            if self._owned:
                self._transport.close()
            raise

    def rounds(self) -> Generator[Asked, Any, None]:
        """Make a step as a generator of rounds, for ranks that live in one process; under ``torch.no_grad()``."""
        raise NotImplementedError

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange and step. Collective.

        A closure is called once, and its value is given back.
        """
        if hasattr(self, "found_inf"):
            raise ConfigurationError(
                f"{type(self).__name__}: gradients that a GradScaler has scaled cannot be exchanged; use "
                "torch.autocast with bfloat16, which needs no scaler"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._transport.run(self.rounds())
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with or without names; see `torch.optim.Optimizer.add_param_group`. On all ranks."""
        members = param_group["params"]
        given: dict[torch.Tensor, str] = {}
        if not isinstance(members, torch.Tensor | set):  # a set has no order and is refused by torch
            pairs = [member if isinstance(member, tuple) else (None, member) for member in members]
            given = {parameter: name_of(name) for name, parameter in pairs if name is not None}
            members = [parameter for _, parameter in pairs]
        super().add_param_group({**param_group, "params": members})
        for parameter in self.param_groups[-1]["params"]:
            name = given.get(parameter, str(len(self._names)))
            if name in self._names.values():
                raise ConfigurationError(f"{type(self).__name__}: two parameters are named '{name}'; names must differ")
            self._names[parameter] = name

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and under ``"mpicomp"`` the steps and this rank's states of the reducers."""
        kept = {name: reducer.state_dict() for name, reducer in self.reducers.items()}
        return super().state_dict() | {"mpicomp": to_tensors({"steps": self.steps, "reducers": kept})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Each rank loads its own; not collective.

        Raises
        ------
        ConfigurationError
            Where it is the state of another kind of optimizer.
        """
        kept = to_arrays(state_dict.get("mpicomp", {}))
        if set(kept.get("reducers", ())) != set(self.reducers):
            raise ConfigurationError(
                f"{type(self).__name__}: the state is of another optimizer; state['mpicomp'] must be what its own "
                "state_dict() gave"
            )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "mpicomp"})
        for name, reducer in self.reducers.items():
            reducer.load_state_dict(kept["reducers"][name])
        self.steps = int(kept["steps"])

    def close(self) -> None:
        """Release the reducers' MPI resources. It waits for nobody; a second call does nothing."""
        for reducer in self.reducers.values():
            reducer.close()
        if self._owned:
            self._transport.close()

    def _members(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Return the name, the parameter and the group of all that require a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    yield self._names[parameter], parameter, group


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient, dense; zeros where it has none, so that all ranks exchange the same arrays."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
