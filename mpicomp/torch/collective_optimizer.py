"""The base class of optimizers whose step is an exchange of more than gradients."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from mpicomp.errors import ConfigurationError
from mpicomp.reducer import Reducer
from mpicomp.reducer.agreement import run_collectively
from mpicomp.rounds import Rounds
from mpicomp.torch.arguments import as_real, check_kind, named_pairs, split_group
from mpicomp.torch.optimizer_proxy import NotCopyable
from mpicomp.torch.replica_checks import ReplicaChecks, SettingsCheck
from mpicomp.torch.states import to_arrays, to_tensors
from mpicomp.transport.connect import connected

Params = torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]]


class CollectiveOptimizer(NotCopyable, torch.optim.Optimizer):
    """Base of optimizers whose step is an exchange: a subclass defines `rounds` and fills ``reducers``.

    Ranks compare the settings of their groups in every step, and parameters after steps 1, 2, 4, 8 and so on, then
    after every 500th. A parameter without a name is called by its number. ``check`` raises the error of a setting.
    """

    _step_supports_amp_scaling = True  # a GradScaler calls step() also where this rank's gradients overflowed

    def __init__(
        self, params: Params, defaults: dict[str, Any], check: Callable[[], None], comm: Any, same_batches: bool
    ) -> None:
        self.reducers: dict[str, Reducer] = {}
        self.steps = 0
        self._names: dict[torch.Tensor, str] = {}
        who = type(self).__name__
        with connected(comm) as transport:

            def make() -> None:
                check()
                members: Any = params
                if isinstance(params, torch.nn.Module):
                    members = named_pairs(params, who, transport.group.size)
                super(CollectiveOptimizer, self).__init__(members, defaults)

            run_collectively(make, transport, who)
        self._transport = transport
        self._owns_transport = transport is not comm
        settings = SettingsCheck(self, who)
        self._checks = ReplicaChecks(who, self._parameters, self._transport.group, settings, same_batches)

    def rounds(self) -> Rounds[None]:
        """Make a step as a generator of rounds, for ranks that live in one process; under ``torch.no_grad()``."""
        raise NotImplementedError

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange and step. Collective. A closure is called once, and its value is returned."""
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
        plain, pairs = split_group(self, param_group)
        if pairs:
            plain = {**param_group, "params": [parameter for _, parameter in pairs]}
        super().add_param_group(plain)
        names = dict(self._names)
        try:
            for name, parameter in pairs:
                name = str(len(names)) if name is None else name
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
        refuse_join(type(self).__name__)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and under ``"mpicomp"`` the steps and this rank's states of the reducers."""
        states = {name: reducer.state_dict() for name, reducer in self.reducers.items()}
        return super().state_dict() | {"mpicomp": to_tensors({"steps": self.steps, "reducers": states})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank. Not collective."""
        state = to_arrays(state_dict.get("mpicomp", {}))
        if set(state.get("reducers", ())) != set(self.reducers):
            raise ConfigurationError(
                f"{type(self).__name__}: the state is of another optimizer; state['mpicomp'] must come from the "
                "state_dict() of one like this"
            )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "mpicomp"})
        for name, reducer in self.reducers.items():
            reducer.load_state_dict(state["reducers"][name])
        self.steps = int(state["steps"])

    def close(self) -> None:
        """Release MPI resources without waiting for other ranks; a second call does nothing."""
        for reducer in self.reducers.values():
            reducer.close()
        if self._owns_transport:
            self._transport.close()

    def _mpicomp_progress(self) -> dict[str, Any]:
        """Return what `mpicomp.torch.broadcast_optimizer_state` sends besides state and settings."""
        return {"steps": self.steps}

    def _mpicomp_load_progress(self, progress: Mapping[str, Any]) -> None:
        self.steps = progress["steps"]

    def _exchange(self, reducer: Reducer, arrays: Mapping[str, torch.Tensor], lr: float) -> Rounds[Any]:
        """Average arrays, and check that ranks have the same settings and parameters."""
        yield from self._checks.begin()
        return (yield from reducer.rounds(arrays, lr, extra=self._checks))

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter for name, parameter, _ in self._members()}

    def _members(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Yield name, parameter and group of each parameter that requires a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    yield self._names[parameter], parameter, group


def check_adam_settings(subsystem: str, betas: tuple[float, float], **settings: float) -> None:
    """Refuse settings out of range of an optimizer like Adam."""
    for name, value in settings.items():
        if not value >= 0:
            raise ConfigurationError(f"{subsystem}: {name} must be at least 0, got {value!r}")
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigurationError(f"{subsystem}: betas must be at least 0 and below 1, got {betas!r}")


def gradient_of(parameter: torch.Tensor, weight_decay: float = 0.0) -> torch.Tensor:
    """Return a parameter's gradient, zeros without one, dense and real, with weight decay added."""
    values = as_real(parameter)
    if parameter.grad is None:
        gradient = torch.zeros_like(values)
    else:
        gradient = as_real(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
    return gradient.add(values, alpha=weight_decay) if weight_decay else gradient


def refuse_join(subsystem: str) -> NoReturn:
    """Raise the error of an optimizer whose ranks need equally many batches."""
    raise ConfigurationError(
        f"{subsystem}: join() is not served, all ranks need equally many batches; DistributedOptimizer and "
        "UpdateOptimizer have a join() for ranks with different numbers of them"
    )
