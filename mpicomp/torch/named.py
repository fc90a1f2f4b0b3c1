"""The parameters of an optimizer: their names, which of them can be exchanged, and complex ones as reals."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mpicomp.arrays import Described
from mpicomp.errors import ConfigurationError
from mpicomp.torch.states import name_of

Named = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""Parameters with names: a model stands for its ``named_parameters()``."""
SERVED_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
MAX_NORM = (
    "forward of an Embedding with max_norm= writes to its weight, in the rows that the rank's batch looks up; leave "
    "max_norm out and call weight.data.renorm_(2, 0, max_norm) after optimizer.step() on all ranks"
)
"""Why replicas come apart, and what to do."""


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as pairs of reals, with a last dimension of 2; any other tensor as it is.

    The memory is shared, except with a tensor that is conjugated lazily.
    """
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.resolve_conj())


def described(tensors: Mapping[str, torch.Tensor]) -> list[Described]:
    """Return names, dtypes and shapes, for ranks to compare."""
    return [
        Described(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def named_of(named: Named, subsystem: str, ranks: int) -> list[tuple[str, torch.Tensor]]:
    """Return pairs of name and parameter.

    Parameters
    ----------
    named : iterable of (str, torch.Tensor), mapping or torch.nn.Module
        What a script has passed.
    subsystem : str
        Start of error messages.
    ranks : int
        Number of ranks that have to hold the same parameters.

    Raises
    ------
    ConfigurationError
        For what holds no such pairs, such as ``model.parameters()``, and for a model whose replicas cannot stay equal.
    """
    if isinstance(named, torch.nn.Module):
        if ranks > 1:
            check_forward(named, subsystem)
        return list(named.named_parameters())
    pairs = pairs_of(named, subsystem, "pass named_parameters=model.named_parameters(), or the model itself")
    for name, parameter in pairs:
        if not isinstance(parameter, torch.Tensor):
            raise ConfigurationError(
                f"{subsystem}: '{name}' must be a parameter, got {type(parameter).__name__}; pass named_parameters="
                "model.named_parameters(), or the model itself"
            )
    return pairs


def pairs_of(named: Any, subsystem: str, advice: str) -> list[tuple[str, Any]]:
    """Return pairs of a name and something else, or raise a `ConfigurationError` that ends in advice."""
    try:
        pairs: list[Any] = list(named.items() if isinstance(named, Mapping) else named)
    except TypeError:
        pairs = [named]
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            what = "a parameter without a name" if isinstance(pair, torch.Tensor) else type(pair).__name__
            raise ConfigurationError(f"{subsystem}: pairs of name and parameter are needed, got {what}; {advice}")
    return [(name, value) for name, value in pairs]


def check_forward(model: torch.nn.Module, subsystem: str) -> None:
    """Refuse a model whose forward writes to parameters: replicas with different batches come apart."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigurationError(f"{subsystem}: '{name or 'the model'}' has max_norm={module.max_norm}: {MAX_NORM}")


def check_kind(name: str, parameter: torch.Tensor, subsystem: str) -> None:
    """Refuse a parameter whose gradients cannot be exchanged."""
    if torch.nn.parameter.is_lazy(parameter):
        found = "has no shape yet"
        advice = "run one batch through the model, on all ranks, before the optimizer is made"
    elif is_sharded(parameter):
        found = "is a DTensor, of which each rank holds a part"
        advice = "FSDP and tensor parallelism are not served, see docs/pytorch.md; leave out fully_shard()"
    elif parameter.is_meta:
        found = "is on the device 'meta' and has no values"
        advice = "call model.to_empty(device=...) and load or initialise it before the optimizer is made"
    elif parameter.layout != torch.strided:
        found = f"has the layout {parameter.layout}"
        advice = "keep it as a dense parameter; its gradients may be sparse"
    elif parameter.is_quantized or parameter.dtype not in SERVED_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in SERVED_DTYPES)
        found = f"is of {str(parameter.dtype).removeprefix('torch.')}"
        advice = f"parameters that are trained must be one of {known}; keep a master copy in one of them"
    elif parameter.is_conj() or parameter.is_neg():
        found = "is a view that conjugates or negates lazily"
        advice = "make the parameter of tensor.resolve_conj().resolve_neg()"
    else:
        return
    raise ConfigurationError(f"{subsystem}: parameter '{name}' {found}; {advice}")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, whose module is not loaded for that."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


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
        Where names are not unique, or a parameter that requires a gradient has none or cannot be exchanged.
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
    stepped = {key: p for key, p in ours.items() if p.requires_grad or p.grad is not None}
    for name, parameter in chosen.items():
        if id(parameter) in stepped:
            check_kind(name, parameter, subsystem)
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
        chosen = names.get(id(parameter), None if name is None else name_of(name))
        if chosen is None:
            raise ConfigurationError(
                f"{subsystem}: a parameter of the new group has no name; pass names with it, as in "
                '{"params": head.named_parameters(prefix="head")}, on all ranks'
            )
        if chosen in found or taken.get(chosen, id(parameter)) != id(parameter):
            raise ConfigurationError(f"{subsystem}: two parameters are named '{chosen}'; names must differ")
        if parameter.requires_grad:
            check_kind(chosen, parameter, subsystem)
        found[chosen] = parameter
    return plain, found
