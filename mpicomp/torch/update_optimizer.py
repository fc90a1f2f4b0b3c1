"""An optimizer whose steps each rank makes by itself, and whose changes of the parameters are averaged."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from mpicomp.collectives import fitting
from mpicomp.compressors import Compressor
from mpicomp.policies import Policy
from mpicomp.policies.warmup import with_warmup
from mpicomp.reducer import Reducer
from mpicomp.reducer.agreement import run_collectively
from mpicomp.reducer.special_reducers import TrainingReducer
from mpicomp.torch.arguments import NamedParameters, named_pairs
from mpicomp.torch.optimizer_proxy import wrap
from mpicomp.torch.overlap import start_overlap_thread
from mpicomp.torch.replica_checks import COMPARE_EVERY
from mpicomp.torch.second_moments import SharedMoments
from mpicomp.torch.shared_parameters import SharedParameters
from mpicomp.torch.states import name_of
from mpicomp.torch.step_watch import StepWatch, hook_gradients
from mpicomp.torch.update_arguments import AUTO, LOCAL, Sharing, check_arguments, check_moments
from mpicomp.torch.update_proxy import WHO, UpdateProxy
from mpicomp.transport import Transport
from mpicomp.transport.connect import connect

_LOCAL_STEPS = (1, 2, 4, 8, 16)  # that "auto" chooses from: with more, what they harm is not known well enough


def UpdateOptimizer(  # noqa: N802, a factory that reads like the class that it stands for
    optimizer: torch.optim.Optimizer,
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
    """Make ranks exchange what their optimizers have changed, compressed, in place of gradients.

    Each rank steps on its local gradient. After every ``sync_every`` steps the changes of parameters are averaged over
    the ranks, with error feedback; the parameters that all ranks share move by the mean, and every rank continues from
    them, the same bits on all. An optimizer that divides by the root of a gradient's mean square, as Adam does, sees
    the gradients of its rank unchanged: rare elements do not arrive in bursts that slow it down.

    Collective over ``comm``, as are the steps of the returned optimizer: all ranks make equally many.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any, also one that calls a closure many times or takes sparse gradients. Its state stays on its rank. Gradients
        are clipped on each rank before its step; a learning rate that schedulers change is that of all ranks.
    named_parameters : iterable of (str, torch.Tensor), mapping or torch.nn.Module
        ``model.named_parameters()`` or the model: every parameter of the optimizer that requires a gradient has to be
        among them. One that is frozen later continues to take part, with a change of zero. Complex ones are exchanged
        as pairs of reals.
    sync_every : int or "auto"
        Steps from one exchange to the next. With ``"auto"`` the joint choice begins with one and increases it, up to
        16, where measured seconds predict that training gets further in the same time.
    compressor, collective, policy, feedback, feedback_decay, comm, warmup
        See `mpicomp.Reducer`; its steps are exchanges.
    outer : mapping, optional
        ``lr``, ``momentum``, ``nesterov``, ``dampening`` and ``weight_decay`` of a `torch.optim.SGD` that moves the
        shared parameters along the mean change, as DiLoCo does with a rate of 0.7 and a Nesterov momentum of 0.9. With
        ``"sign": True`` the mean change counts by its sign alone, times the learning rate of the first group, as in
        DeMo; no exchange is dense in place of the compressor's then, unless a policy is named that may choose that.
        None moves them by the mean.
    second_moments : {"local", "shared"} or mapping
        Whether ranks share the second moments that the optimizer divides by the root of. Local ones have the noise of
        the rank's batches alone, which makes steps shorter. With ``"shared"`` they are averaged at exchanges, the first
        time at the first one, then when half as many steps more were made, and at the latest after 100; in between all
        ranks divide by the average, or by a quarter of the local moment where that is more, since a burst must not be
        divided by next to nothing. They travel as powers of two, in 9 bits an element, and cost two copies of the
        parameters. A mapping shares them with ``sync_every`` in place of 100, and with ``compressor``: ``"dense"`` in
        place of ``"natural"``. It takes Adam, AdamW, NAdam, RAdam, RMSprop, or another one that keeps a mean square as
        ``exp_avg_sq`` or ``square_avg``.
    sync_delay : int
        Steps, at most ``sync_every / fragments``, that are made during an exchange: its outcome is applied after them,
        and a rank keeps what it has changed in them. It costs another copy of the parameters. A thread exchanges
        meanwhile where MPI was started with MPI_THREAD_MULTIPLE, and not with ``on_failure="shrink"``; otherwise the
        exchange is waited for at once.
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
        The same optimizer, which from now on is of a class derived from its present one: schedulers, hooks and steps
        that were put into it, before or later, work as before. It has ``reducers``, a `mpicomp.Reducer` for each
        fragment, and ``reducer``, the first of them; ``synchronize()``, which exchanges all that was changed by now and
        waits for it, to be called on all ranks before the end or a checkpoint where ``sync_every`` or ``sync_delay``
        has left something; ``shared()``, the shared parameters by name; ``rounds(closure)``, its step as a generator of
        rounds; and ``close()``, which ``with`` calls at its end and after which it can be wrapped again. Its
        ``state_dict()`` has the shared parameters and this rank's states of the reducers under ``"mpicomp"``: with it
        and the model's, training continues bit for bit.

    Raises
    ------
    ConfigurationError
        For an optimizer, parameters or settings that cannot be served.
    DisagreementError
        At the first exchange, where ranks have other parameters, and at later ones where a script has written to the
        parameters otherwise on some rank; at each where the class or a setting of the optimizer, such as its learning
        rate, is another one on some rank.
    NonFiniteError
        With ``nonfinite="raise"``, on all ranks; the parameters then are those of the last exchange.

    Notes
    -----
    With one rank and ``outer=None`` it is the optimizer itself, to rounding; nothing is shared then.

    A GradScaler works as in a single process, each rank with its scale: a rank whose gradients overflowed skips its
    step, and takes part in the exchange.

    What a script writes to parameters is copied to the shared ones, if all ranks write the same between an exchange and
    the next step; at other times it is a part of that rank's change.

    Different from DiLoCo's papers: streaming DiLoCo mixes the outcome of a delayed exchange with a rank's parameters,
    which loses a part of what the rank has changed meanwhile; here it keeps that.

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
    transport = connect(comm)
    try:

        def check() -> Any:
            ranks = transport.group.size
            pairs = named_pairs(named_parameters, WHO, ranks)
            found = check_arguments(
                optimizer, pairs, sync_every, compressor, outer, sync_delay, fragments, compare_every, settings, ranks
            )
            sharing = check_moments(optimizer, second_moments)
            return pairs, *found, None if ranks == 1 else sharing

        pairs, parameters, chosen, sharing = run_collectively(check, transport, WHO)
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
        policies = [policy] if fragments == 1 else [_copy_of(policy) for _ in range(fragments)]
        settings |= {"feedback_decay": feedback_decay}
        local_steps = _LOCAL_STEPS if sync_every == AUTO else (1,)
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
                    local_steps=local_steps,
                    **settings,
                ),
                part,
                compared,
                optimizer,
                outer,
                compare_every,
                same_batches,
                None if sharing is None else _shared_moments(optimizer, sharing, nonfinite, transport, settings),
            )
            for part, policy_of_part in zip(_cut(parameters, fragments), policies, strict=True)
        ]
    except BaseException:
        if transport is not comm:
            transport.close()
        raise
    needs_thread = sync_delay and transport.concurrent and not parts[0].reducer.survives
    thread = start_overlap_thread(parts[0].reducer, True)[0] if needs_thread else None
    wrapped = wrap(optimizer, UpdateProxy, "Updating")
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
    if thread is not None:
        weakref.finalize(wrapped, thread.stop).atexit = False
    return wrapped


def _never_dense(chosen: Compressor | None, collective: str, policy: Any) -> str:
    """Return a collective with which no step is dense in place of the compressor's: the signs of that mean differ.

    A named collective stays, and so does the one of a policy that chooses compressors.
    """
    is_named = collective != "auto" or getattr(policy, "id", policy) not in (None, "static")
    if is_named or chosen is None or chosen.message == "dense" or not chosen.can_fall_back_to_dense:
        return collective
    return fitting(chosen)[0]


def _shared_moments(
    optimizer: torch.optim.Optimizer, sharing: Sharing, nonfinite: str, transport: Transport, settings: dict[str, Any]
) -> SharedMoments:
    of_reducer = {name: settings[name] for name in ("seed", "threads") if name in settings}
    collective = "two-phase" if sharing.compressor.message == "packed" else "scatter-reduce"
    of_moments = "pass" if nonfinite == "pass" else "skip"  # the changes' reducer then raises or skips the step
    reducer = Reducer(sharing.compressor, collective, "static", False, of_moments, transport, **of_reducer)
    return SharedMoments(optimizer, reducer, sharing.key, sharing.sync_every)


def _cut(parameters: Mapping[str, torch.Tensor], fragments: int) -> list[dict[str, torch.Tensor]]:
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


def _copy_of(policy: Policy | str | Mapping[str, Any] | None) -> Any:
    """Return what makes a policy like this one: an object serves one reducer alone."""
    return policy.get_config() if isinstance(policy, Policy) else policy
