"""The base class of optimizers that exchange other things than gradients, or exchange gradients in their own way."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from mpicomp.errors import ConfigurationError
from mpicomp.reducer import Reducer
from mpicomp.reducer.agreement import together
from mpicomp.rounds import Rounds
from mpicomp.torch.named import as_real, check_kind, named_of
from mpicomp.torch.replica_checks import ReplicaChecks, SettingsCheck
from mpicomp.torch.states import name_of, to_arrays, to_tensors
from mpicomp.torch.wrapped import Uncopied
from mpicomp.transport.connect import connect

Params = torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]


class Exchanging(Uncopied, torch.optim.Optimizer):
    """An optimizer whose step is an exchange. A subclass gives `rounds` and puts its reducers into ``reducers``.

    Creating one and `step` are collective. Ranks compare the settings of their groups in every step, and parameters
    after steps 1, 2, 4, 8 and so on, then after every 500th: `DisagreementError` where they differ.

    Parameters
    ----------
    params : iterable or torch.nn.Module
        Parameters, (name, parameter) pairs or parameter groups with either. Without a name a parameter goes by its
        number. A model stands for its ``named_parameters()``.
    defaults : dict
        Settings of groups that do not say otherwise.
    check : callable
        Raises `ConfigurationError` where a setting cannot be; it is raised on all ranks then.
    comm : mpi4py.MPI.Comm, Transport or None
        A communicator is duplicated. None stands for MPI.COMM_WORLD.
    same_batches : bool
        Whether ranks are meant to draw the same batches: else there is a warning.

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

    def __init__(
        self, params: Params, defaults: dict[str, Any], check: Callable[[], None], comm: Any, same_batches: bool
    ) -> None:
        self.reducers: dict[str, Reducer] = {}
        self.steps = 0
        self._names: dict[torch.Tensor, str] = {}
        self._transport = connect(comm)
        self._owned = self._transport is not comm

        def make() -> None:
            check()
            members: Any = params
            if isinstance(params, torch.nn.Module):
                members = named_of(params, type(self).__name__, self._transport.group.size)
            super(Exchanging, self).__init__(members, defaults)

        try:
            together(make, self._transport, type(self).__name__)
        except BaseException:
            if self._owned:
                self._transport.close()
            raise
        who = type(self).__name__
        self._checks = ReplicaChecks(
            who, self._parameters, self._transport.group, SettingsCheck(self, who), same_batches
        )

    def rounds(self) -> Rounds[None]:
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
        names = dict(self._names)
        try:
            for parameter in self.param_groups[-1]["params"]:
                name = given.get(parameter, str(len(names)))
                if name in names.values():
                    raise ConfigurationError(
                        f"{type(self).__name__}: two parameters are named '{name}'; names must differ"
                    )
                if parameter.requires_grad:
                    check_kind(name, parameter, type(self).__name__)
                names[parameter] = name
        except ConfigurationError:
            self.param_groups.pop()
            raise
        self._names = names

    def join(self) -> NoReturn:
        """Refuse ranks with different numbers of batches."""
        refuse_join(type(self).__name__)

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

    def _exchange(self, reducer: Reducer, arrays: Mapping[str, torch.Tensor], lr: float) -> Rounds[Any]:
        """Average arrays, and check that ranks have the same settings and parameters. As rounds."""
        yield from self._checks.begin()
        return (yield from reducer.rounds(arrays, lr, beside=self._checks))

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter for name, parameter, _ in self._members()}

    def _members(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Return the name, the parameter and the group of all that require a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    yield self._names[parameter], parameter, group


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient, dense and real; zeros where it has none, so that ranks exchange the same arrays.

    See `mpicomp.torch.named.as_real`.
    """
    if parameter.grad is None:
        return torch.zeros_like(as_real(parameter))
    return as_real(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)


def refuse_join(subsystem: str) -> NoReturn:
    """Raise the error of an optimizer whose ranks need equally many batches."""
    raise ConfigurationError(
        f"{subsystem}: join() is not served, all ranks need equally many batches; DistributedOptimizer and "
        "UpdateOptimizer have a join() for ranks with different numbers of them"
    )
