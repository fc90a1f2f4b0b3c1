"""Several optimizers that step as one, each on its parameters."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mpicomp.errors import ConfigurationError
from mpicomp.torch.proxy import OptimizerProxy


class CombinedOptimizer(torch.optim.Optimizer):
    """Optimizers behind one ``param_groups`` and one ``state``; ``defaults`` are settings that all of them have."""

    def __init__(self, optimizers: Sequence[Any], subsystem: str) -> None:
        _check(optimizers, subsystem)
        self.optimizers: list[torch.optim.Optimizer] = []
        groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
        names = set.intersection(*(set(optimizer.defaults) for optimizer in optimizers))
        super().__init__([{"params": []}], {name: optimizers[0].defaults[name] for name in names})
        self.optimizers = list(optimizers)
        self._owners = [optimizer for optimizer, _ in groups]  # of the groups
        self._link()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the last optimizer, or to the one whose index is in ``"optimizer"``."""
        if not self.optimizers:  # in the constructor of the base class
            super().add_param_group(param_group)
            return
        owner = self.optimizers[param_group.get("optimizer", -1)]
        owner.add_param_group({key: value for key, value in param_group.items() if key != "optimizer"})
        self._owners.append(owner)
        self.param_groups.append(owner.param_groups[-1])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        groups, state = state_dict["param_groups"], state_dict["state"]
        lengths, expected = ([len(group["params"]) for group in of] for of in (groups, self.param_groups))
        if lengths != expected:
            raise ValueError(f"loaded state dict has groups of {lengths} parameters, and the optimizers of {expected}")
        for optimizer in self.optimizers:
            loaded = [group for group, owner in zip(groups, self._owners, strict=True) if owner is optimizer]
            members = [member for group in loaded for member in group["params"]]
            of_members = {member: state[member] for member in members if member in state}
            optimizer.load_state_dict({"state": of_members, "param_groups": loaded})
        self._link()

    def _link(self) -> None:
        # The optimizers load new groups and states, which are shared again.
        self.state = defaultdict(dict)
        for optimizer in self.optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state
        groups = {id(optimizer): iter(optimizer.param_groups) for optimizer in self.optimizers}
        self.param_groups = [next(groups[id(owner)]) for owner in self._owners]


def optimizers_in(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a combined one, or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]


def _check(optimizers: Sequence[Any], subsystem: str) -> None:
    if not optimizers:
        raise ConfigurationError(f"{subsystem}: the list of optimizers is empty; pass at least one")
    places: dict[int, int] = {}
    for place, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(f"{subsystem}: a torch optimizer is needed, got {kind} at place {place} of a list")
        if isinstance(optimizer, OptimizerProxy | CombinedOptimizer):
            raise ConfigurationError(f"{subsystem}: {kind} at place {place} of a list must be a plain optimizer")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError(
                f"{subsystem}: LBFGS calls its closure many times, and of several optimizers each makes one step on "
                "one gradient; pass it alone"
            )
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if places.setdefault(id(parameter), place) != place:
                raise ConfigurationError(
                    f"{subsystem}: a parameter of shape {tuple(parameter.shape)} is in the optimizers at places "
                    f"{places[id(parameter)]} and {place} of a list; it must be in one"
                )
