"""Checks of the arguments of `mpicomp.torch.UpdateOptimizer`, before anything is exchanged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpicomp.compressors import Compressor, get_compressor
from mpicomp.errors import ConfigurationError
from mpicomp.reducer.settings import check_settings
from mpicomp.setting_checks import check_flag, check_least
from mpicomp.torch.arguments import check_no_ddp, members_of, parameters_by_name
from mpicomp.torch.collective_optimizer import CollectiveOptimizer
from mpicomp.torch.optimizer_proxy import OptimizerProxy, check_not_nested
from mpicomp.torch.second_moments import DECAYS
from mpicomp.torch.update_proxy import WHO, UpdateProxy

AUTO = "auto"
LOCAL, SHARED = "local", "shared"
_OUTER = ("lr", "momentum", "nesterov", "dampening", "weight_decay", "sign")
_SYNC_EVERY = 100  # steps from one average of second moments to the next, late in training; of text-gpt
_RTOL = 1e-4  # of rounding in float32, for a mean square
_FITS = "Adam, AdamW, NAdam, RAdam, RMSprop and others that keep a mean square as 'exp_avg_sq' or 'square_avg'"


@dataclass(frozen=True)
class Sharing:
    """How ranks share second moments: what averages them, their name in an optimizer's state, steps to an average."""

    compressor: Compressor
    key: str
    sync_every: int


def check_arguments(
    optimizer: Any,
    pairs: Sequence[tuple[str, torch.Tensor]],
    sync_every: int | str,
    compressor: Compressor | str | Mapping[str, Any] | None,
    outer: Mapping[str, Any] | None,
    sync_delay: int,
    fragments: int,
    compare_every: int,
    settings: Mapping[str, Any],
    ranks: int,
) -> tuple[dict[str, torch.Tensor], Compressor | None]:
    """Refuse settings that cannot be served; return the optimizer's parameters by name, and the compressor."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"{WHO}: a torch optimizer is needed, got {type(optimizer).__name__}")
    is_closed = isinstance(optimizer, UpdateProxy) and optimizer._mpicomp_closed
    if isinstance(optimizer, CollectiveOptimizer | OptimizerProxy) and not is_closed:
        raise ConfigurationError(f"{WHO}: {type(optimizer).__name__} exchanges already; pass a plain optimizer")
    _check_steps(sync_every, sync_delay, fragments)
    check_least(WHO, "compare_every", compare_every, 0)
    if outer is not None:
        _check_outer(outer)
    chosen = None if compressor is None else get_compressor(compressor)
    if chosen is not None and chosen.entry.momentum:
        raise ConfigurationError(
            f"{WHO}: {chosen!r} applies momentum to gradients, and what is exchanged here are changes of parameters, "
            "which the optimizer's momentum is part of; set momentum=0 in it"
        )
    check_settings(settings, compressor, WHO)
    parameters = parameters_by_name(optimizer, pairs, WHO)
    if fragments > len(parameters):
        raise ConfigurationError(f"{WHO}: fragments must be at most {len(parameters)}, as many as parameters")
    check_no_ddp(parameters, ranks, WHO)
    check_not_nested(optimizer, WHO)
    return parameters, chosen


def _check_steps(sync_every: int | str, sync_delay: int, fragments: int) -> None:
    if sync_every == AUTO and (sync_delay or fragments != 1):
        raise ConfigurationError(
            f"{WHO}: sync_every='{AUTO}' chooses again after each exchange, and sync_delay and fragments are "
            "fractions of it; name a number, or leave them out"
        )
    most = 1 if isinstance(sync_every, str) else sync_every
    if isinstance(sync_every, str) and sync_every != AUTO:
        raise ConfigurationError(f"{WHO}: sync_every must be an integer of at least 1, or '{AUTO}', got {sync_every!r}")
    for name, value, least in (("sync_every", most, 1), ("sync_delay", sync_delay, 0), ("fragments", fragments, 1)):
        check_least(WHO, name, value, least)
    if fragments > most:
        raise ConfigurationError(f"{WHO}: fragments must be at most sync_every={most}, got {fragments}")
    if sync_delay > most // fragments:
        raise ConfigurationError(
            f"{WHO}: sync_delay must be at most sync_every // fragments = {most // fragments}, so that one exchange "
            f"ends before the next begins, got {sync_delay}"
        )


def _check_outer(outer: Any) -> None:
    unknown = sorted(set(outer) - set(_OUTER)) if isinstance(outer, Mapping) else [outer]
    if unknown:
        raise ConfigurationError(f"{WHO}: outer must have some of {', '.join(_OUTER)}, got {unknown[0]!r}")
    check_flag(WHO, "outer['sign']", outer.get("sign", False))
    if outer.get("sign") and outer.get("momentum"):
        raise ConfigurationError(
            f"{WHO}: outer has momentum and takes the sign of changes, which have no scale any more; leave momentum "
            "out: residuals are one, with feedback_decay"
        )
    try:
        torch.optim.SGD([torch.zeros(1)], **{name: value for name, value in outer.items() if name != "sign"})
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{WHO}: outer: {error}") from None


def check_moments(optimizer: torch.optim.Optimizer, moments: Any) -> Sharing | None:
    """Return how second moments are shared, or raise the error of an optimizer that has none; None for local ones."""
    if moments == LOCAL:
        return None
    config = {} if moments == SHARED else moments
    if not isinstance(config, Mapping):
        raise ConfigurationError(f"{WHO}: second_moments must be '{LOCAL}', '{SHARED}' or a mapping, got {moments!r}")
    unknown = sorted(set(config) - {"sync_every", "compressor"})
    if unknown:
        raise ConfigurationError(f"{WHO}: second_moments must have some of compressor, sync_every, got {unknown[0]!r}")
    every = config.get("sync_every", _SYNC_EVERY)
    check_least(WHO, "second_moments['sync_every']", every)
    compressor = get_compressor(config.get("compressor", "natural"))
    if compressor.id not in ("natural", "dense") or getattr(compressor, "wire", None) == "fp16":
        raise ConfigurationError(
            f"{WHO}: second_moments['compressor'] must be 'natural' or 'dense', got {compressor!r}; mean squares span "
            "many powers of ten, and none of them may become zero"
        )
    return Sharing(compressor, _moments_key(optimizer), every)


def _moments_key(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the second moments in the optimizer's state, as seen in two steps of one of its kind."""
    gradients = 1.0, 2.0
    kind = type(optimizer).__bases__[1] if isinstance(optimizer, OptimizerProxy) else type(optimizer)
    refused = f"{WHO}: second_moments='{SHARED}' needs an optimizer with second moments, and {kind.__name__}"
    device = next(members_of(optimizer)).device
    keys = set()
    for group in optimizer.param_groups:
        try:
            state = _state_of_trial(kind, group, gradients, device)
        except Exception as error:
            raise ConfigurationError(
                f"{refused} cannot be tried out ({type(error).__name__}: {error}); what fits: {_FITS}"
            ) from None
        for extreme, setting in (("max_exp_avg_sq", "amsgrad"), ("grad_avg", "centered")):
            if extreme in state:
                raise ConfigurationError(
                    f"{refused} does not divide by them alone with {setting}=True; make it with {setting}=False"
                )
        found = [name for name in DECAYS if name in state]
        if not found:
            raise ConfigurationError(f"{refused} has none; what fits: {_FITS}. second_moments='{LOCAL}' shares nothing")
        keys.add(found[0])
        try:
            decay = float(DECAYS[found[0]](group))
        except LookupError:
            decay = float("nan")
        expected = decay * (1 - decay) * gradients[0] ** 2 + (1 - decay) * gradients[1] ** 2
        if not abs(float(state[found[0]]) - expected) <= _RTOL * expected or "step" not in state:
            raise ConfigurationError(
                f"{refused} has '{found[0]}', which is no mean square with the decay of its group; what fits: {_FITS}"
            )
    [key] = keys  # of one class
    return key


def _state_of_trial(
    kind: Any, group: Mapping[str, Any], gradients: Sequence[float], device: torch.device
) -> Mapping[str, Any]:
    """Return the state of an optimizer of a kind, with a group's settings, after some steps."""
    trial = torch.zeros(1, dtype=torch.float32, device=device, requires_grad=True)
    settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    settings |= {name: 0.0 for name in ("lr", "weight_decay") if name in settings}  # so that it stays where it is
    optimizer = kind([{"params": [trial]} | settings])
    for gradient in gradients:
        trial.grad = torch.full_like(trial, gradient)
        optimizer.step()
    state: Mapping[str, Any] = optimizer.state[trial]
    return state
