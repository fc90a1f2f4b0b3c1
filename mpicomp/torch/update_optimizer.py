"""`UpdateOptimizer`: each rank steps by itself, and changes of parameters are averaged; and checks of its arguments."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpicomp.collectives import fitting
from mpicomp.compressors import Compressor, get_compressor
from mpicomp.errors import ConfigurationError
from mpicomp.policies import Policy, get_policy
from mpicomp.policies.interval import Interval
from mpicomp.policies.warmup import with_warmup
from mpicomp.reducer import Reducer
from mpicomp.reducer.settings import check_arguments
from mpicomp.reducer.special_reducers import TrainingReducer
from mpicomp.setting_checks import check_flag, check_least
from mpicomp.torch.arguments import NamedParameters, check_no_ddp, named_pairs, parameters_by_name
from mpicomp.torch.combined_optimizer import CombinedOptimizer, optimizers_in
from mpicomp.torch.optimizer_proxy import OptimizerProxy, check_not_nested, wrap
from mpicomp.torch.replica_checks import COMPARE_EVERY
from mpicomp.torch.shards import check_shards, is_sharded, make_for_replicas
from mpicomp.torch.shared_parameters import SharedParameters
from mpicomp.torch.states import name_of
from mpicomp.torch.step_watch import StepWatch, hook_gradients
from mpicomp.torch.update_proxy import WHO, UpdateProxy, report_own_steps
from mpicomp.transport.connect import connected

AUTO = "auto"
_OUTER = ("lr", "momentum", "nesterov", "dampening", "weight_decay", "sign")


@check_arguments(WHO, Reducer)
def UpdateOptimizer(  # noqa: N802, a factory that reads like the class that it stands for
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    named_parameters: NamedParameters,
    sync_every: int | str = 1,
    compressor: Compressor | str | Mapping[str, Any] | None = None,
    collective: str = "auto",
    policy: Policy | str | Mapping[str, Any] | None = None,
    *,
    outer: Mapping[str, Any] | None = None,
    feedback: bool | None = None,
    feedback_decay: float = 1.0,
    nonfinite: str = "raise",
    comm: Any = None,
    warmup: int | str | None = None,
    compare_every: int = COMPARE_EVERY,
    same_batches: bool = False,
    **settings: Any,
) -> Any:
    """Make ranks exchange the changes of parameters, compressed, in place of gradients.

    Each rank steps on its gradient. After every ``sync_every`` steps the changes of parameters are averaged over the
    ranks, with error feedback; the parameters that all ranks share move by the mean, and every rank continues from
    them. An optimizer such as Adam sees the gradients of its rank unchanged: with error feedback on gradients, rare
    elements would arrive in bursts that slow it down.

    Collective over ``comm``, as are the steps of the returned optimizer: all ranks make equally many.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer or sequence of them
        Any, also one that calls a closure many times or takes sparse gradients. Its state stays on its rank. Gradients
        are clipped on each rank before its step; the learning rate must be the same on all ranks. Several, such as
        ``[muon, adamw]``, each with parameters of its own, become one with the groups of all: a step is one of each,
        after one call of a closure, and a scheduler sets all rates. A group that is added later is the last one's, or
        that of the index in ``{"params": ..., "optimizer": index}``.
    named_parameters : iterable of (str, torch.Tensor), mapping or torch.nn.Module
        ``model.named_parameters()`` or the model, with every parameter of the optimizer that requires a gradient. One
        that is frozen later has a change of zero. Complex ones are exchanged as pairs of reals.
    sync_every : int or "auto"
        Steps from one exchange to the next. ``"auto"`` is the policy ``interval``: it begins with one, and takes the
        least of 1, 2, 5, 10, 20 and 40 with which the exchange, dense without a compressor, is predicted to take at
        most a quarter of the steps before it. A compressor with a number of bits gets as many as fit in that quarter:
        its own, 2, 4, or dense. Both are chosen again whenever seconds are measured; the record has the reason.
    compressor, collective, policy, feedback, feedback_decay, comm, warmup
        See `mpicomp.Reducer`; its steps are exchanges.
    outer : mapping, optional
        Settings of a `torch.optim.SGD` that moves the shared parameters along the mean change, as in DiLoCo with
        ``lr=0.7, momentum=0.9, nesterov=True``; also ``dampening`` and ``weight_decay``. With ``"sign": True`` the mean
        change counts by its sign, times the learning rate of the first group; then no exchange is dense,
        unless a policy is named that may choose that. None moves them by the mean.
    nonfinite : {"raise", "skip", "pass"}
        For changes that are not finite on some rank; see `mpicomp.Reducer`. With ``"skip"`` a rank skips its step where
        its gradients are not finite, so that no NaN enters its optimizer.
    compare_every : int
        Most exchanges from one comparison of the ranks' shared parameters to the next, bit for bit; the first ones are
        after 1, 2, 4, 8 and so on. 0 compares them only at the first and where a script has written to parameters.
    same_batches : bool
        Whether ranks are meant to draw the same batches: else there is a warning where the changes of the first
        exchanges were the same on all of them.
    **settings
        Further settings of `mpicomp.Reducer`.

    Returns
    -------
    torch.optim.Optimizer
        The same optimizer, now of a class derived from its former one: schedulers, hooks and replaced steps work as
        before. In place of several it is a new one, which has them as ``optimizers``. It has ``reducer``, a
        `mpicomp.Reducer`; ``synchronize()``, which exchanges all changes, to be called on all ranks before the end or a
        checkpoint where ``sync_every`` has left some; ``shared()``, the shared parameters by name; ``join()``, a
        context for ranks with different numbers of batches; ``rounds(closure)``, its step as a generator of rounds; and
        ``close()``, which ``with`` calls at its end and after which it can be wrapped again. With its ``state_dict()``
        and the model's on each rank training resumes bit for bit.

    Raises
    ------
    ConfigurationError
        For an optimizer, parameters or settings that cannot be served.
    DisagreementError
        At an exchange where parameters that the ranks began with or that a script has written differ, or the class or a
        setting of the optimizer, such as its learning rate.
    NonFiniteError
        With ``nonfinite="raise"``, on all ranks; the parameters then are those of the last exchange.

    Notes
    -----
    With one rank and ``outer=None`` it is the optimizer itself, to rounding; nothing is shared then. A GradScaler works
    as in a single process: a rank whose gradients overflowed skips its step, and takes part in the exchange.

    Writes of a script to parameters, between an exchange and the next step and on all ranks alike, are copied to the
    shared ones; at other times they are a part of that rank's change.

    References
    ----------
    Douillard et al. 2023, arXiv 2311.08105 (DiLoCo); Sarfi et al. 2025, arXiv 2508.15706 (SparseLoCo).

    Examples
    --------
    >>> import torch
    >>> from mpicomp.transport import LocalWorld
    >>> world = LocalWorld(2)
    >>> models = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
    >>> models[1].load_state_dict(models[0].state_dict())
    <All keys matched successfully>
    >>> optimizers = [
    ...     UpdateOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters(), comm=end)
    ...     for model, end in zip(models, world.transports)
    ... ]
    >>> for rank, model in enumerate(models):
    ...     model(torch.tensor([[1.0, rank]])).sum().backward()
    >>> steps = world.run([optimizer.rounds() for optimizer in optimizers])
    >>> torch.equal(models[0].weight, models[1].weight)
    True
    """
    with connected(comm) as transport:

        def check() -> Any:
            ranks = transport.group.size
            pairs = named_pairs(named_parameters, WHO, ranks)
            one: Any = CombinedOptimizer(optimizer, WHO) if isinstance(optimizer, list | tuple) else optimizer
            found = _check_arguments(one, pairs, sync_every, compressor, outer, compare_every, settings, ranks)
            if sync_every == AUTO and policy is not None:
                _check_chooses(policy)
            return one, pairs, *found

        inner, pairs, parameters, chosen = make_for_replicas(check, lambda made: made[2], transport, WHO)
        if outer is not None and outer.get("sign"):
            collective = _never_dense(chosen, collective, policy)
        compared = {
            "sync_every": sync_every,
            "outer": None if outer is None else dict(outer),
            "compare_every": compare_every,
        }
        settings |= {"feedback_decay": feedback_decay}
        reducer = TrainingReducer(
            chosen,
            collective,
            with_warmup(policy, warmup),
            feedback,
            nonfinite,
            transport,
            normalises=False,
            default_policy=Interval.id if sync_every == AUTO else None,
            **settings,
        )
        if sync_every == AUTO:
            reducer.policy.chooses_steps = True  # type: ignore[attr-defined]
        shared = SharedParameters(reducer, parameters, compared, inner, outer, compare_every, same_batches)
    wrapped = wrap(inner, UpdateProxy, "Updating")
    wrapped._mpicomp_names = {id(parameter): name_of(name) for name, parameter in pairs}
    wrapped._mpicomp_steps = 0
    wrapped._mpicomp_interval = reducer.policy if sync_every == AUTO else None
    wrapped._mpicomp_every = 1 if sync_every == AUTO else sync_every
    wrapped._mpicomp_shared = shared
    wrapped._mpicomp_skips = nonfinite == "skip"
    wrapped._mpicomp_transport, wrapped._mpicomp_owns_transport = transport, transport is not comm
    wrapped._mpicomp_watch = StepWatch(WHO, accumulates=True)
    wrapped._mpicomp_hooks = hook_gradients(parameters, wrapped._mpicomp_watch.filled)
    wrapped._mpicomp_end = weakref.finalize(wrapped, report_own_steps, shared, transport.group)
    return wrapped


def _never_dense(chosen: Compressor | None, collective: str, policy: Any) -> str:
    """Return a collective without dense steps, whose mean has other signs; a named one or a policy's stays."""
    is_named = collective != "auto" or getattr(policy, "id", policy) not in (None, "static")
    if is_named or chosen is None or chosen.message == "dense" or not chosen.can_fall_back_to_dense:
        return collective
    return fitting(chosen)[0]


def _check_arguments(
    optimizer: Any,
    pairs: Sequence[tuple[str, torch.Tensor]],
    sync_every: int | str,
    compressor: Compressor | str | Mapping[str, Any] | None,
    outer: Mapping[str, Any] | None,
    compare_every: int,
    settings: Mapping[str, Any],
    ranks: int,
) -> tuple[dict[str, torch.Tensor], Compressor | None]:
    """Return the optimizer's parameters by name, and the compressor, or raise the error of an argument."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"{WHO}: a torch optimizer is needed, got {type(optimizer).__name__}")
    is_closed = isinstance(optimizer, UpdateProxy) and optimizer._mpicomp_closed
    if isinstance(optimizer, OptimizerProxy) and not is_closed:
        raise ConfigurationError(f"{WHO}: {type(optimizer).__name__} exchanges already; pass a plain optimizer")
    if isinstance(sync_every, str) and sync_every != AUTO:
        raise ConfigurationError(f"{WHO}: sync_every must be an integer of at least 1, or '{AUTO}', got {sync_every!r}")
    if sync_every != AUTO:
        check_least(WHO, "sync_every", sync_every)
    check_least(WHO, "compare_every", compare_every, 0)
    if outer is not None:
        _check_outer(outer)
    chosen = None if compressor is None else get_compressor(compressor)
    if chosen is not None and chosen.entry.momentum:
        raise ConfigurationError(
            f"{WHO}: {chosen!r} applies momentum to gradients, and what is exchanged here are changes of parameters, "
            "which the optimizer's momentum is part of; set momentum=0 in it"
        )
    parameters = parameters_by_name(optimizer, pairs, WHO)
    check_shards(parameters, settings, WHO)
    if sync_every == AUTO and any(map(is_sharded, parameters.values())):
        raise ConfigurationError(
            f"{WHO}: sync_every='{AUTO}' would choose for each shard alone, and all of a model has to be exchanged at "
            "the same steps; name a number"
        )
    check_no_ddp(parameters, ranks, WHO)
    for plain in optimizers_in(optimizer):
        check_not_nested(plain, WHO, averages_gradients=False)
    return parameters, chosen


def _check_chooses(policy: Policy | str | Mapping[str, Any]) -> None:
    named = get_policy({"id": Interval.id} | dict(policy) if isinstance(policy, Mapping) else policy)
    if not isinstance(named, Interval):
        raise ConfigurationError(
            f"{WHO}: sync_every='{AUTO}' is policy '{Interval.id}', got policy='{named.id}'; name a number of steps"
        )


def _check_outer(outer: Mapping[str, Any]) -> None:
    unknown = sorted(set(outer) - set(_OUTER))
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
