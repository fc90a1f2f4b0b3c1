"""The parameters of an optimizer by their names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpicomp.errors import ConfigurationError


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
    for name, parameter in named:
        if name in chosen:
            raise ConfigurationError(f"{subsystem}: two parameters are named '{name}'; names must differ")
        if id(parameter) in ours and id(parameter) not in seen:
            chosen[name] = parameter
            seen.add(id(parameter))
    stepped = {key: p for key, p in ours.items() if p.requires_grad or p.grad is not None}
    missing = [parameter for key, parameter in stepped.items() if key not in seen]
    if missing:
        raise ConfigurationError(
            f"{subsystem}: {len(missing)} parameters of the optimizer have no name, the first of shape "
            f"{tuple(missing[0].shape)}; pass named_parameters=model.named_parameters() of the same model"
        )
    if not any(parameter.requires_grad for parameter in chosen.values()):
        raise ConfigurationError(f"{subsystem}: no parameter requires a gradient")
    return chosen


def named_group(
    optimizer: Any, param_group: Mapping[str, Any], names: Mapping[int, str], subsystem: str, unnamed: bool = False
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a group as torch's optimizer takes it, and its parameters by name.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        To which the group is to be added.
    param_group : mapping
        Its ``"params"`` may be (name, parameter) pairs.
    names : mapping of int to str
        By the id of every parameter that has a name already.
    subsystem : str
        Start of the error message.
    unnamed : bool
        Whether parameters need no name.

    Raises
    ------
    ConfigurationError
        Where a parameter has no name, or one that another parameter has.
    """
    members = param_group["params"]
    if isinstance(members, set):  # it has no order, and torch refuses it
        return dict(param_group), {}
    members = [members] if isinstance(members, torch.Tensor) else list(members)
    pairs = [member if isinstance(member, tuple) else (None, member) for member in members]
    parameters = [parameter for _, parameter in pairs]
    if "param_names" in param_group:
        pairs = list(zip(param_group["param_names"], parameters, strict=True))
    plain = {**param_group, "params": members}
    if optimizer.param_groups and "param_names" not in optimizer.param_groups[0]:  # names are in all groups or in none
        plain["params"] = parameters
        plain.pop("param_names", None)
    if unnamed:
        return plain, {}
    found: dict[str, torch.Tensor] = {}
    taken = {name: key for key, name in names.items()}
    for name, parameter in pairs:
        chosen = names.get(id(parameter), name)
        if chosen is None:
            raise ConfigurationError(
                f"{subsystem}: a parameter of the new group has no name; pass names with it, as in "
                '{"params": head.named_parameters(prefix="head")}, on all ranks'
            )
        if chosen in found or taken.get(chosen, id(parameter)) != id(parameter):
            raise ConfigurationError(f"{subsystem}: two parameters are named '{chosen}'; names must differ")
        found[chosen] = parameter
    return plain, found
