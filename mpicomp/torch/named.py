"""The parameters of an optimizer by their names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpicomp.errors import ConfigurationError
from mpicomp.torch.states import name_of


def parameters_of(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, torch.Tensor]], subsystem: str
) -> dict[str, torch.Tensor]:
    """Return the optimizer's parameters by name, in the order of the model.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        With at least one parameter that requires a gradient.
    named : sequence of (str, torch.Tensor)
        ``model.named_parameters()``; those that are in no group of the optimizer are left out.
    subsystem : str
        Start of error messages.

    Raises
    ------
    ConfigurationError
        Where names are not unique, or a parameter that requires a gradient has none.
    """
    ours = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    chosen: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, parameter in ((name_of(name), parameter) for name, parameter in named):
        if name in chosen:
            raise ConfigurationError(f"{subsystem}: two parameters are named '{name}'; names must differ")
        if id(parameter) in ours and id(parameter) not in seen:
            chosen[name] = parameter
            seen.add(id(parameter))
    missing = [parameter for key, parameter in ours.items() if parameter.requires_grad and key not in seen]
    if missing:
        raise ConfigurationError(
            f"{subsystem}: {len(missing)} parameters of the optimizer have no name, the first of shape "
            f"{tuple(missing[0].shape)}; pass named_parameters=model.named_parameters() of the same model"
        )
    if not any(parameter.requires_grad for parameter in chosen.values()):
        raise ConfigurationError(f"{subsystem}: no parameter requires a gradient")
    return chosen


def names_of_group(optimizer: Any, names: Mapping[int, str], subsystem: str) -> dict[str, torch.Tensor]:
    """Return the parameters of the group that was added last by name; without names the group is removed again.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Whose group was added.
    names : mapping of int to str
        By the id of every parameter that has a name.
    subsystem : str
        Start of the error message.
    """
    try:
        return {names[id(parameter)]: parameter for parameter in optimizer.param_groups[-1]["params"]}
    except KeyError:
        optimizer.param_groups.pop()
        raise ConfigurationError(
            f"{subsystem}: a parameter of the new group has no name; named_parameters has to hold all that will ever "
            "be trained, such as those of the whole model"
        ) from None
