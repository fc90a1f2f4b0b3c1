"""Arguments of scripts: named parameters and groups, checked before anything is exchanged."""

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mpicomp.errors import ConfigurationError
from mpicomp.torch.shards import is_sharded, refusal_of
from mpicomp.torch.states import name_of

NamedParameters = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""Parameters with names; a model stands for its ``named_parameters()``."""

MAX_NORM_ADVICE = (
    "forward of an Embedding with max_norm= writes to its weight, in the rows that the rank's batch looks up; leave "
    "max_norm out and call weight.data.renorm_(2, 0, max_norm) after optimizer.step() on all ranks"
)
_FSDP1_ADVICE = "shard the model by torch.distributed.fsdp.fully_shard(), whose shards are exchanged"
_SERVED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as pairs of reals, in the same memory unless conjugated lazily; others unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def members_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters in an optimizer's groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def learning_rate(optimizer: Any) -> Any:
    """Return the rate of an optimizer's first group, or None."""
    lr = optimizer.param_groups[0].get("lr")
    return lr.detach() if isinstance(lr, torch.Tensor) else lr


def named_pairs(named: NamedParameters, subsystem: str, ranks: int) -> list[tuple[str, torch.Tensor]]:
    """Return pairs of name and parameter, or raise the error of another argument."""
    advice = "pass named_parameters=model.named_parameters(), or the model itself"
    if isinstance(named, torch.nn.Module):
        if ranks > 1:
            check_forward(named, subsystem)
        return list(named.named_parameters())
    pairs = to_pairs(named, subsystem, advice)
    for name, parameter in pairs:
        if not isinstance(parameter, torch.Tensor):
            raise ConfigurationError(
                f"{subsystem}: '{name}' must be a parameter, got {type(parameter).__name__}; {advice}"
            )
    return pairs


def to_pairs(named: Any, subsystem: str, advice: str) -> list[tuple[str, Any]]:
    """Return pairs of name and value, or raise an error that ends in ``advice``."""
    try:
        pairs: list[Any] = list(named.items() if isinstance(named, Mapping) else named)
    except TypeError:
        pairs = [named]
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            found = "a parameter without a name" if isinstance(pair, torch.Tensor) else type(pair).__name__
            raise ConfigurationError(f"{subsystem}: pairs of name and parameter are needed, got {found}; {advice}")
    return [(name, value) for name, value in pairs]


def check_forward(model: torch.nn.Module, subsystem: str) -> None:
    """Refuse a model whose forward writes to parameters: replicas with different batches would differ."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigurationError(
                f"{subsystem}: '{name or 'the model'}' has max_norm={module.max_norm}: {MAX_NORM_ADVICE}"
            )


def check_kind(name: str, parameter: torch.Tensor, subsystem: str, takes_shards: bool = False) -> None:
    """Refuse a parameter whose gradients cannot be exchanged."""
    refused = refusal_of(parameter) if is_sharded(parameter) else None
    if torch.nn.parameter.is_lazy(parameter):
        found = "has no shape yet"
        advice = "run one batch through the model, on all ranks, before the optimizer is made"
    elif getattr(parameter, "_is_flat_param", False):
        found, advice = "is a part of FullyShardedDataParallel", _FSDP1_ADVICE
    elif refused is not None:
        found, advice = refused
    elif is_sharded(parameter) and not takes_shards:
        found = "is a DTensor, of which each rank holds a part"
        advice = (
            "DistributedOptimizer and UpdateOptimizer take shards, see docs/pytorch.md; use one of these, or leave "
            "out fully_shard()"
        )
    elif parameter.is_meta:
        found = "is on the device 'meta' and has no values"
        advice = "call model.to_empty(device=...) and load or initialise it before the optimizer is made"
    elif parameter.layout != torch.strided:
        found = f"has the layout {parameter.layout}"
        advice = "keep it as a dense parameter"
    elif parameter.is_quantized or parameter.dtype not in _SERVED_DTYPES:
        served = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SERVED_DTYPES)
        found = f"is of {str(parameter.dtype).removeprefix('torch.')}"
        advice = f"parameters that are trained must be one of {served}; keep a master copy in one of them"
    elif parameter.is_conj() or parameter.is_neg():
        found = "is a view that conjugates or negates lazily"
        advice = "make the parameter of tensor.resolve_conj().resolve_neg()"
    else:
        return
    raise ConfigurationError(f"{subsystem}: parameter '{name}' {found}; {advice}")


def parameters_by_name(
    optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[str, torch.Tensor]], subsystem: str
) -> dict[str, torch.Tensor]:
    """Return the optimizer's parameters by name, in the order of ``pairs``, or raise the error of one."""
    members = {id(parameter): parameter for parameter in members_of(optimizer)}
    chosen: dict[str, torch.Tensor] = {}
    named: set[int] = set()
    for name, parameter in ((name_of(name), parameter) for name, parameter in pairs):
        if name in chosen:
            raise ConfigurationError(f"{subsystem}: two parameters are named '{name}'; names must differ")
        if id(parameter) in members and id(parameter) not in named:
            chosen[name] = parameter
            named.add(id(parameter))
    stepped = {key: p for key, p in members.items() if p.requires_grad or p.grad is not None}
    for name, parameter in chosen.items():
        if id(parameter) in stepped:
            check_kind(name, parameter, subsystem, takes_shards=True)
    missing = [parameter for key, parameter in stepped.items() if key not in named]
    if missing:
        raise ConfigurationError(
            f"{subsystem}: {len(missing)} parameters of the optimizer have no name, the first of shape "
            f"{tuple(missing[0].shape)}; pass named_parameters=model.named_parameters() of the same model"
        )
    if not any(parameter.requires_grad for parameter in chosen.values()):
        raise ConfigurationError(f"{subsystem}: no parameter requires a gradient")
    return chosen


def named_group(
    optimizer: Any, param_group: Mapping[str, Any], names: Mapping[int, str], subsystem: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a group for torch's optimizer, and its parameters by name; ``names`` has those of known ones by id."""
    plain, pairs = split_group(optimizer, param_group)
    found: dict[str, torch.Tensor] = {}
    ids = {name: key for key, name in names.items()}
    for new_name, parameter in pairs:
        name = names.get(id(parameter), new_name)
        if name is None:
            raise ConfigurationError(
                f"{subsystem}: a parameter of the new group has no name; pass names with it, as in "
                '{"params": head.named_parameters(prefix="head")}, on all ranks'
            )
        if name in found or ids.get(name, id(parameter)) != id(parameter):
            raise ConfigurationError(f"{subsystem}: two parameters are named '{name}'; names must differ")
        if parameter.requires_grad:
            check_kind(name, parameter, subsystem, takes_shards=True)
        found[name] = parameter
    return plain, found


def split_group(
    optimizer: Any, param_group: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[str | None, torch.Tensor]]]:
    """Return a group for torch's optimizer, with all names or none, and its pairs of name and parameter."""
    members = param_group["params"]
    if isinstance(members, set):
        return dict(param_group), []
    members = [members] if isinstance(members, torch.Tensor) else list(members)
    pairs = [member if isinstance(member, tuple) else (None, member) for member in members]
    parameters = [parameter for _, parameter in pairs]
    if "param_names" in param_group:
        pairs = list(zip(param_group["param_names"], parameters, strict=True))
    plain = {**param_group, "params": members}
    if optimizer.param_groups and "param_names" not in optimizer.param_groups[0]:
        plain["params"] = parameters
        plain.pop("param_names", None)
    return plain, [(None if name is None else name_of(name), parameter) for name, parameter in pairs]


def check_no_ddp(parameters: Mapping[str, torch.Tensor], ranks: int, subsystem: str) -> None:
    """Refuse parameters that DistributedDataParallel averages over all ranks, or FullyShardedDataParallel cuts."""
    if ranks == 1 or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    ids = {id(parameter) for parameter in parameters.values()}
    fsdp1 = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", type(None))
    kinds = torch.nn.parallel.DistributedDataParallel, fsdp1
    for model in [value for value in gc.get_objects() if value is not None and issubclass(type(value), kinds)]:
        if all(id(parameter) not in ids for parameter in model.parameters()):
            continue
        if isinstance(model, fsdp1):
            raise ConfigurationError(f"{subsystem}: the model is in FullyShardedDataParallel; {_FSDP1_ADVICE}")
        if torch.distributed.get_world_size(model.process_group) == torch.distributed.get_world_size() == ranks:
            raise ConfigurationError(
                f"{subsystem}: the model is in DistributedDataParallel, which averages its gradients over all {ranks} "
                "ranks already, uncompressed; train the module without it, or keep it with a plain optimizer and "
                "register mpicomp.torch.ddp_comm_hook"
            )
