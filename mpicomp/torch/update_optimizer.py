"""`UpdateOptimizer`: each rank steps by itself, and changes of parameters are averaged; and checks of its arguments."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpicomp.collectives import fitting
from mpicomp.compressors import Compressor, get_compressor
from mpicomp.errors import ConfigurationError
from mpicomp.policies import Policy
from mpicomp.policies.warmup import with_warmup
from mpicomp.reducer import Reducer
from mpicomp.reducer.settings import check_arguments
from mpicomp.reducer.special_reducers import TrainingReducer
from mpicomp.setting_checks import check_flag, check_least
from mpicomp.torch.arguments import NamedParameters, check_no_ddp, members_of, named_pairs, parameters_by_name
from mpicomp.torch.combined_optimizer import CombinedOptimizer, optimizers_in
from mpicomp.torch.optimizer_proxy import OptimizerProxy, check_not_nested, wrap
from mpicomp.torch.overlap import start_overlap_thread
from mpicomp.torch.replica_checks import COMPARE_EVERY
from mpicomp.torch.second_moments import DECAYS, SharedMoments
from mpicomp.torch.shards import check_shards, is_sharded, make_for_replicas
from mpicomp.torch.shared_parameters import SharedParameters
from mpicomp.torch.states import name_of
from mpicomp.torch.step_watch import StepWatch, hook_gradients
from mpicomp.torch.update_proxy import WHO, UpdateProxy, report_own_steps
from mpicomp.transport import Transport
from mpicomp.transport.connect import connected

AUTO = "auto"
LOCAL, SHARED = "local", "shared"
_OUTER = ("lr", "momentum", "nesterov", "dampening", "weight_decay", "sign")
_SYNC_EVERY = 100  # steps from one average of second moments to the next, late in training; of text-gpt
_RTOL = 1e-4  # of rounding in float32, for a mean square
_FITS = "Adam, AdamW, NAdam, RAdam, RMSprop and others that keep a mean square as 'exp_avg_sq' or 'square_avg'"


@dataclass(frozen=True)
class _Sharing:
    """How ranks share second moments."""

    compressor: Compressor
    optimizer: torch.optim.Optimizer  # the one of several that has them
    key: str  # in its state
    sync_every: int


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
    second_moments: str | Mapping[str, Any] = "local",
    sync_delay: int = 0,
    fragments: int = 1,
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
        Steps from one exchange to the next. ``"auto"`` begins with one and increases it, up to 16, where measured
        seconds predict that training gets further in the same time. With a compressor it is the least of 1, 2, 5, 10,
        20 and 40 with which the exchange is predicted to take at most a quarter of the steps before it, and a
        compressor with a number of bits gets as many as fit in that quarter: its own, 2, 4, or dense. Both are chosen
        again whenever seconds are measured; the record has the reason.
    compressor, collective, policy, feedback, feedback_decay, comm, warmup
        See `mpicomp.Reducer`; its steps are exchanges.
    outer : mapping, optional
        Settings of a `torch.optim.SGD` that moves the shared parameters along the mean change, as in DiLoCo with
        ``lr=0.7, momentum=0.9, nesterov=True``; also ``dampening`` and ``weight_decay``. With ``"sign": True`` the mean
        change counts by its sign, times the learning rate of the first group; then no exchange is dense,
        unless a policy is named that may choose that. None moves them by the mean.
    second_moments : {"local", "shared"} or mapping
        Whether ranks share the second moments that the optimizer divides by the root of; local ones have the noise of a
        rank's batches, which makes steps shorter. ``"shared"`` averages them at the first exchange, then after half as
        many steps more, and at the latest after 100. In between all ranks divide by the average, or by a quarter of the
        local moment where that is more. They travel in 9 bits an element, and cost two copies of the parameters. A
        mapping has ``sync_every`` in place of 100, and ``compressor``: ``"dense"`` in place of ``"natural"``. It serves
        Adam, AdamW, NAdam, RAdam, RMSprop and others with a mean square in ``exp_avg_sq`` or ``square_avg``; of several
        optimizers, the first of that kind.
    sync_delay : int
        Steps, at most ``sync_every / fragments``, that are made during an exchange, before it is applied; a rank keeps
        its changes in them. It costs another copy of the parameters. A thread exchanges meanwhile where MPI was started
        with MPI_THREAD_MULTIPLE, and not with ``on_failure="shrink"``; otherwise the step waits for the exchange.
    fragments : int
        Parts of about equal size that parameters are cut into, which are exchanged at different steps.
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
        before. In place of several it is a new one, which has them as ``optimizers``. It has ``reducers``, a
        `mpicomp.Reducer` for each fragment, and ``reducer``, the first of them; ``synchronize()``, which exchanges all
        changes and waits for it, to be called on all ranks before the end or a checkpoint where ``sync_every`` or
        ``sync_delay`` has left something; ``shared()``, the shared parameters by name; ``join()``, a context for ranks
        with different numbers of batches; ``rounds(closure)``, its step as a generator of rounds; and ``close()``,
        which ``with`` calls at its end and after which it can be wrapped again. With its ``state_dict()`` and the
        model's on each rank training resumes bit for bit.

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
    shared ones; at other times they are a part of that rank's change. Streaming DiLoCo mixes a delayed exchange with a
    rank's parameters and loses a part of its changes meanwhile; here they are kept.

    References
    ----------
    Douillard et al. 2023, arXiv 2311.08105 (DiLoCo); Douillard et al. 2025, arXiv 2501.18512 (Streaming DiLoCo);
    Sarfi et al. 2025, arXiv 2508.15706 (SparseLoCo).

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
            found = _check_arguments(
                one, pairs, sync_every, compressor, outer, sync_delay, fragments, compare_every, settings, ranks
            )
            sharing = _check_moments(one, second_moments)
            return one, pairs, *found, None if ranks == 1 else sharing

        inner, pairs, parameters, chosen, sharing = make_for_replicas(check, lambda made: made[2], transport, WHO)
        if outer is not None and outer.get("sign"):
            collective = _never_dense(chosen, collective, policy)
        compared = {
            "sync_every": sync_every,
            "outer": None if outer is None else dict(outer),
            "sync_delay": sync_delay,
            "fragments": fragments,
            "compare_every": compare_every,
            "second_moments": LOCAL
            if sharing is None
            else {"sync_every": sharing.sync_every, **sharing.compressor.get_config()},
        }
        # A policy object serves one reducer.
        config = policy.get_config() if isinstance(policy, Policy) else policy
        policies = [policy] if fragments == 1 else [config] * fragments
        settings |= {"feedback_decay": feedback_decay}
        parts = [
            SharedParameters(
                TrainingReducer(
                    chosen,
                    collective,
                    with_warmup(policy_of_part, warmup),
                    feedback,
                    nonfinite,
                    transport,
                    normalises=False,
                    local_steps=sync_every == AUTO,
                    **settings,
                ),
                part,
                compared,
                inner,
                outer,
                compare_every,
                same_batches,
                None if sharing is None else _shared_moments(sharing, nonfinite, transport, settings),
            )
            for part, policy_of_part in zip(_fragments(parameters, fragments), policies, strict=True)
        ]
    needs_thread = sync_delay and transport.concurrent and not parts[0].reducer.survives
    thread = start_overlap_thread(parts[0].reducer, True)[0] if needs_thread else None
    wrapped = wrap(inner, UpdateProxy, "Updating")
    wrapped._mpicomp_names = {id(parameter): name_of(name) for name, parameter in pairs}
    wrapped._mpicomp_steps = 0
    wrapped._mpicomp_chooses = sync_every == AUTO
    wrapped._mpicomp_every, wrapped._mpicomp_delay = 1 if sync_every == AUTO else sync_every, sync_delay
    wrapped._mpicomp_fragments = parts
    wrapped._mpicomp_thread = thread
    wrapped._mpicomp_skips = nonfinite == "skip"
    wrapped._mpicomp_transport, wrapped._mpicomp_owns_transport = transport, transport is not comm
    wrapped._mpicomp_watch = StepWatch(WHO, accumulates=True)
    wrapped._mpicomp_hooks = hook_gradients(parameters, wrapped._mpicomp_watch.filled)
    wrapped._mpicomp_end = weakref.finalize(wrapped, report_own_steps, parts, transport.group)
    if thread is not None:
        weakref.finalize(wrapped, thread.stop).atexit = False
    return wrapped


def _never_dense(chosen: Compressor | None, collective: str, policy: Any) -> str:
    """Return a collective without dense steps, whose mean has other signs; a named one or a policy's stays."""
    is_named = collective != "auto" or getattr(policy, "id", policy) not in (None, "static")
    if is_named or chosen is None or chosen.message == "dense" or not chosen.can_fall_back_to_dense:
        return collective
    return fitting(chosen)[0]


def _shared_moments(sharing: _Sharing, nonfinite: str, transport: Transport, settings: dict[str, Any]) -> SharedMoments:
    of_reducer = {name: settings[name] for name in ("seed", "threads") if name in settings}
    collective = "two-phase" if sharing.compressor.message == "packed" else "scatter-reduce"
    of_moments = "pass" if nonfinite == "pass" else "skip"  # the changes' reducer then raises or skips the step
    reducer = Reducer(sharing.compressor, collective, "static", False, of_moments, transport, **of_reducer)
    return SharedMoments(sharing.optimizer, reducer, sharing.key, sharing.sync_every)


def _fragments(parameters: Mapping[str, torch.Tensor], fragments: int) -> list[dict[str, torch.Tensor]]:
    """Cut parameters into consecutive parts of about equal size, none of them empty."""
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(fragments)]
    left = sum(parameter.numel() for parameter in parameters.values())
    place, filled = 0, 0
    for index, (name, parameter) in enumerate(parameters.items()):
        empty = fragments - place - 1  # parts after this one
        is_full = filled + parameter.numel() / 2 >= left / (empty + 1)
        if parts[place] and empty and (is_full or len(parameters) - index <= empty):
            left, filled, place = left - filled, 0, place + 1
        parts[place][name] = parameter
        filled += parameter.numel()
    return parts


def _check_arguments(
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
    """Return the optimizer's parameters by name, and the compressor, or raise the error of an argument."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"{WHO}: a torch optimizer is needed, got {type(optimizer).__name__}")
    is_closed = isinstance(optimizer, UpdateProxy) and optimizer._mpicomp_closed
    if isinstance(optimizer, OptimizerProxy) and not is_closed:
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
    parameters = parameters_by_name(optimizer, pairs, WHO)
    if fragments > len(parameters):
        raise ConfigurationError(f"{WHO}: fragments must be at most {len(parameters)}, as many as parameters")
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


def _check_moments(optimizer: torch.optim.Optimizer, moments: Any) -> _Sharing | None:
    """Return how second moments are shared, or None, or raise the error of an optimizer without any."""
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
    for candidate in optimizers_in(optimizer):
        try:
            return _Sharing(compressor, candidate, _moments_key(candidate), every)
        except ConfigurationError as error:
            refused = error
    raise refused


def _moments_key(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of second moments in the optimizer's state, found in two steps of a trial optimizer."""
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
    settings |= {name: 0.0 for name in ("lr", "weight_decay") if name in settings}  # the parameter does not move
    optimizer = kind([{"params": [trial]} | settings])
    for gradient in gradients:
        trial.grad = torch.full_like(trial, gradient)
        optimizer.step()
    state: Mapping[str, Any] = optimizer.state[trial]
    return state
