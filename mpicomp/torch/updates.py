"""An optimizer whose steps each rank makes by itself, and whose changes of the parameters are averaged."""

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mpicomp.compressors import Compressor, get_compressor
from mpicomp.errors import ConfigurationError
from mpicomp.policies import Policy
from mpicomp.reducer import Reducer
from mpicomp.reducer.agreement import together
from mpicomp.rounds import Asked
from mpicomp.torch.comparing import COMPARE_EVERY, check_every, share
from mpicomp.torch.exchanging import Exchanging
from mpicomp.torch.named import names_of_group, parameters_of
from mpicomp.torch.overlap import overlap_thread
from mpicomp.torch.shared_parameters import SharedParameters
from mpicomp.torch.wrapped import Arguments, Wrapped, unwrap, wrap
from mpicomp.transport import Transport
from mpicomp.transport.connect import connect
from mpicomp.transport.interleave import ProgressThread

_WHO = "UpdateOptimizer"
AUTO = "auto"
_LOCAL_STEPS = (1, 2, 4, 8, 16)  # that "auto" chooses from: with more, what they harm is not known well enough
_OUTER = ("lr", "momentum", "nesterov", "dampening", "weight_decay", "sign")


def UpdateOptimizer(  # noqa: N802, a factory that reads like the class that it stands for
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    every: int | str = 1,
    compressor: Compressor | str | Mapping[str, Any] | None = None,
    collective: str = "auto",
    policy: Policy | str | Mapping[str, Any] | None = None,
    *,
    outer: Mapping[str, Any] | None = None,
    late: int = 0,
    fragments: int = 1,
    feedback: bool | None = None,
    feedback_decay: float = 1.0,
    nonfinite: str = "raise",
    comm: Any = None,
    warmup: int | str | None = None,
    compare_every: int = COMPARE_EVERY,
    **settings: Any,
) -> Any:
    """Make ranks exchange what their optimizers have changed, compressed, in place of gradients.

    Each rank steps on its own gradient. After every ``every`` steps, what that has changed of the parameters is
    averaged over the ranks, with error feedback; the parameters that all ranks share move by the mean, and every rank
    goes on from them, the same bits on all. An optimizer that divides by the root of a gradient's mean square, as Adam
    does, sees the gradients of its rank as they are: what is sent seldom does not come in bursts that slow it down.

    Collective over ``comm``, as are the steps of what it returns: all ranks make equally many.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any, one that calls a closure many times or takes sparse gradients among them. Its state stays on its rank.
        Gradients are clipped on each rank before its step; a learning rate that schedulers change is that of all ranks.
    named_parameters : iterable of (str, torch.Tensor)
        ``model.named_parameters()``: every parameter of the optimizer that requires a gradient has to be among
        them. One that is frozen later goes on taking part, with a change of zero.
    every : int or "auto"
        Steps from one exchange to the next. With ``"auto"`` the joint choice begins with one and takes more, up to 16,
        where the seconds that are measured say that they bring training further in the same time.
    compressor, collective, policy, feedback, feedback_decay, comm, warmup
        See `mpicomp.Reducer`; its steps are exchanges.
    outer : mapping, optional
        ``lr``, ``momentum``, ``nesterov``, ``dampening`` and ``weight_decay`` of a `torch.optim.SGD` that moves the
        shared parameters along the mean change, as DiLoCo does with a rate of 0.7 and a Nesterov momentum of 0.9. With
        ``"sign": True`` the mean change counts by its sign alone, times the learning rate of the first group, as in
        DeMo. None moves them by the mean.
    late : int
        Steps, at most ``every / fragments``, that are made while an exchange is under way: its outcome is taken up
        after them, and what a rank has changed in them it keeps. It costs another copy of the parameters. A thread
        exchanges meanwhile where MPI was started with MPI_THREAD_MULTIPLE, and not with ``on_failure="shrink"``; else
        the exchange is waited for at once.
    fragments : int
        Parts that parameters are cut into, of about equal size, which are exchanged at different steps.
    nonfinite : {"raise", "skip", "pass"}
        Of changes that are not finite on some rank; see `mpicomp.Reducer`. With ``"skip"`` a rank leaves out its own
        step where its gradients are not, so that no NaN enters its optimizer.
    compare_every : int
        Exchanges from one comparison of the ranks' shared parameters to the next, bit for bit; 0 compares them only
        at the first and where a script has written to parameters.
    **settings
        Further settings of `mpicomp.Reducer`.

    Returns
    -------
    torch.optim.Optimizer
        The same optimizer, which from now on is of a class derived from its own: schedulers, hooks and steps that were
        put into it, before or later, work as before. It has ``reducers``, a `mpicomp.Reducer` for each fragment, and
        ``reducer``, the first of them; ``synchronize()``, which exchanges all that was changed by now and waits for it,
        to be called on all ranks before the end or a checkpoint where ``every`` or ``late`` has left something;
        ``shared()``, the shared parameters by name; ``rounds(closure)``, its step as a generator of rounds; and
        ``close()``, after which it can be wrapped anew. Its ``state_dict()`` has the shared parameters and what the
        reducers keep on this rank under ``"mpicomp"``: with it and the model's, training goes on bit for bit.

    Raises
    ------
    ConfigurationError
        For an optimizer, parameters or settings that cannot be served.
    DisagreementError
        At the first exchange, where ranks have other settings or parameters, and at later ones where a script has
        written to the parameters otherwise on some rank.
    NonFiniteError
        With ``nonfinite="raise"``, on all ranks; the parameters then are those of the last exchange.

    Notes
    -----
    With one rank and ``outer=None`` it is the optimizer itself, to rounding.

    A GradScaler works as in a single process, each rank with its own scale: a rank whose gradients overflowed leaves
    out its step, and takes part in the exchange.

    What a script writes to parameters is taken over by the shared ones, if all ranks write the same between an
    exchange and the next step; at other times it is a part of that rank's change.

    Different from DiLoCo's papers: streaming DiLoCo mixes the outcome of an exchange that comes late with a rank's own
    parameters, which loses a part of what the rank has changed meanwhile; here it keeps that.

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
        named, parameters, chosen = together(
            lambda: _check(optimizer, named_parameters, every, compressor, outer, late, fragments, compare_every),
            transport,
            _WHO,
        )
        own = {
            "every": every,
            "outer": None if outer is None else dict(outer),
            "late": late,
            "fragments": fragments,
            "compare_every": compare_every,
        }
        policies = [policy] if fragments == 1 else [_copy_of(policy) for _ in range(fragments)]
        settings |= {"warmup": warmup, "feedback_decay": feedback_decay, "normalises": False}
        if every == AUTO:
            settings["local_steps"] = _LOCAL_STEPS
        parts = [
            SharedParameters(
                Reducer(chosen, collective, of_part, feedback, nonfinite, transport, **settings),
                part,
                own,
                outer,
                compare_every,
            )
            for part, of_part in zip(_cut(parameters, fragments), policies, strict=True)
        ]
    except BaseException:
        if transport is not comm:
            transport.close()
        raise
    beside = late and transport.concurrent and not parts[0].reducer.survives
    thread = overlap_thread(parts[0].reducer, True) if beside else None
    if isinstance(optimizer, Wrapped):
        unwrap(optimizer)
    wrapped = wrap(optimizer, _Updating, "Updating")
    wrapped._mpicomp_names = {id(parameter): name for name, parameter in named}
    wrapped._mpicomp_steps = 0
    wrapped._mpicomp_chooses = every == AUTO
    wrapped._mpicomp_every, wrapped._mpicomp_late = 1 if every == AUTO else every, late
    wrapped._mpicomp_parts = parts
    wrapped._mpicomp_thread = thread
    wrapped._mpicomp_skips = nonfinite == "skip"
    wrapped._mpicomp_transport, wrapped._mpicomp_owned = transport, transport is not comm
    wrapped._mpicomp_closed = False
    if thread is not None:
        weakref.finalize(wrapped, thread.stop).atexit = False
    return wrapped


class _Updating(Wrapped):
    """Mixin that `UpdateOptimizer` puts in front of an optimizer's class: it exchanges changes after its steps."""

    param_groups: list[dict[str, Any]]
    _mpicomp_names: dict[int, str]
    _mpicomp_steps: int
    _mpicomp_chooses: bool  # whether the policy says how many steps there are to an exchange
    _mpicomp_every: int
    _mpicomp_late: int
    _mpicomp_parts: list[SharedParameters]
    _mpicomp_thread: ProgressThread | None
    _mpicomp_skips: bool
    _mpicomp_transport: Transport
    _mpicomp_owned: bool
    _mpicomp_closed: bool
    _mpicomp_exchanges = True
    _mpicomp_idle = False
    _mpicomp_joined: "_Joined | None" = None
    _mpicomp_hidden: tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]] = ({}, [])

    # A GradScaler leaves step() out where this rank's gradients overflowed, and the others would wait for it. With this
    # it calls step() on all of them, after it has set ``found_inf``.
    _step_supports_amp_scaling = True

    @property
    def reducer(self) -> Reducer:
        """The reducer of the first fragment."""
        return self._mpicomp_parts[0].reducer

    @property
    def reducers(self) -> list[Reducer]:
        """A reducer for each fragment."""
        return [part.reducer for part in self._mpicomp_parts]

    @property
    def every(self) -> int:
        """Steps from one exchange to the next."""
        return self._mpicomp_every

    @property
    def overlaps(self) -> bool:
        """Whether a thread exchanges while later steps are computed."""
        return self._mpicomp_thread is not None

    def shared(self) -> dict[str, torch.Tensor]:
        """Return the shared parameters by name, the same bits on all ranks; not to be written to."""
        return {name: shared for part in self._mpicomp_parts for name, shared in part.values.items()}

    @contextmanager
    def join(self) -> Iterator[None]:
        """Return a context for a loop that has more batches on some ranks than on others, on all ranks.

        Where the loop of a rank is over, the end of the context takes part in the exchanges of the others, with what
        its residuals hold, until all are done. Means are those of the ranks that have had batches since the exchange
        before. If an error leaves the loop, the context communicates nothing.

        Raises
        ------
        ConfigurationError
            Inside of another one.
        DisagreementError
            At the first exchange, on all ranks, where some rank makes it without ``join()``.
        """
        if self._mpicomp_joined is not None:
            raise ConfigurationError(f"{_WHO}: join() inside of join(); put the whole loop into one")
        self._mpicomp_joined = joined = _Joined()
        try:
            yield
            self._mpicomp_idle = True
            while not joined.over:
                self.step()
        finally:
            self._mpicomp_joined, self._mpicomp_idle = None, False
            for part in self._mpicomp_parts:
                part.part()

    def rounds(self, closure: Callable[[], Any] | None = None) -> Generator[Asked, Any, Any]:
        """Step, then exchange where it is due, as a generator of rounds, for ranks that live in one process."""
        self._mpicomp_exchanges = False
        try:
            loss = self.step(closure)
        finally:
            self._mpicomp_exchanges = True
        yield from self._mpicomp_rounds()
        return loss

    def synchronize(self) -> None:
        """Exchange all that was changed by now, and wait for what is under way. Collective."""
        self._mpicomp_transport.run(self.synchronizing())

    def synchronizing(self) -> Generator[Asked, Any, None]:
        """Do what `synchronize` does as a generator of rounds, for ranks that live in one process."""
        for part in self._mpicomp_parts:
            if part.under_way:
                part.finish()
        for part in self._mpicomp_parts:
            if not part.fresh:
                yield from part.exchange_now(self._mpicomp_lr())

    def _mpicomp_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Take over what a script has written to parameters, and hide gradients that are not finite."""
        for part in self._mpicomp_parts:
            part.notice()
        scaled: dict[str, Any] = {
            name: self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__
        }
        self._mpicomp_hidden = scaled, []
        factor, overflowed = scaled.get("grad_scale"), scaled.get("found_inf")
        if factor is not None:
            for _, gradient in self._mpicomp_gradients():
                gradient.mul_(1 / factor.to(gradient.device))
        closure = args[0] if args else kwargs.get("closure")
        if closure is None:
            self._mpicomp_hide(overflowed)
        elif self._mpicomp_skips:

            def called() -> Any:
                loss = closure()
                self._mpicomp_hide(None)
                return loss

            args, kwargs = ((called, *args[1:]), kwargs) if args else (args, kwargs | {"closure": called})
        return args, kwargs

    def _mpicomp_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(p, p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _mpicomp_hide(self, overflowed: torch.Tensor | None) -> None:
        """Hide gradients that are not finite from this rank's step, or all where this rank has no batches."""
        own = self._mpicomp_gradients()
        if overflowed is not None:
            spoilt = bool(overflowed)
        else:
            spoilt = self._mpicomp_skips and not all(_is_finite(gradient) for _, gradient in own)
        if spoilt or self._mpicomp_idle:
            for parameter, _ in own:
                parameter.grad = None  # optimizers pass over such parameters
            self._mpicomp_hidden = self._mpicomp_hidden[0], own

    def _mpicomp_after(self) -> None:
        """Exchange where it is due. Collective."""
        scaled, gradients = self._mpicomp_hidden
        self.__dict__.update(scaled)  # the scaler removes them
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self._mpicomp_hidden = {}, []
        self._mpicomp_steps += 1
        if self._mpicomp_joined is not None and not self._mpicomp_idle:
            self._mpicomp_joined.batches += 1
        if self._mpicomp_exchanges:
            self._mpicomp_transport.run(self._mpicomp_rounds())

    def _mpicomp_rounds(self) -> Generator[Asked, Any, None]:
        """Take up what has come, and begin what is due. As rounds."""
        every, late, lr = self._mpicomp_every, self._mpicomp_late, self._mpicomp_lr()
        ages = [
            (self._mpicomp_steps + place * every // len(self._mpicomp_parts)) % every
            for place in range(len(self._mpicomp_parts))
        ]
        if self._mpicomp_joined is not None and 0 in ages:
            yield from self._mpicomp_meet(self._mpicomp_joined)
            if self._mpicomp_joined.over:
                return
        for part, age in zip(self._mpicomp_parts, ages, strict=True):
            if part.under_way and age == late % every:
                part.finish()
        for part, age in zip(self._mpicomp_parts, ages, strict=True):
            if age == 0:
                yield from part.start(lr, self._mpicomp_thread) if late else part.exchange_now(lr)
        if self._mpicomp_chooses and ages == [0]:
            self._mpicomp_steps, self._mpicomp_every = 0, self.reducer.local_steps

    def _mpicomp_meet(self, joined: "_Joined") -> Generator[Asked, Any, None]:
        """Find out which ranks have had batches since the last exchange. As rounds."""
        parts = self._mpicomp_parts
        if not joined.met:
            yield from parts[0].meet()
            joined.met = True
        told = yield from share([joined.batches > 0], self._mpicomp_transport.group)
        active, idle = int(told.sum()), joined.batches == 0
        joined.batches, joined.over = 0, active == 0
        for part in parts:
            part.take_part(max(active, 1), idle)

    def _mpicomp_lr(self) -> Any:
        lr = self.param_groups[0].get("lr")
        return lr.detach() if isinstance(lr, torch.Tensor) else lr

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see `torch.optim.Optimizer.add_param_group`. On all ranks, between two steps.

        Raises
        ------
        ConfigurationError
            Where they were not among ``named_parameters``.
        """
        super().add_param_group(param_group)  # type: ignore[misc]
        self._mpicomp_parts[-1].add(names_of_group(self, self._mpicomp_names, _WHO))

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with the shared parameters and the reducers' states under ``"mpicomp"``.

        Raises
        ------
        ConfigurationError
            Where an exchange is under way.
        """
        if any(part.under_way for part in self._mpicomp_parts):
            raise ConfigurationError(
                f"{_WHO}: an exchange is under way; call synchronize() on all ranks before state_dict()"
            )
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        own = {
            "steps": self._mpicomp_steps,
            "every": self._mpicomp_every,
            "parts": [part.state_dict() for part in self._mpicomp_parts],
        }
        return state | {"mpicomp": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, or one of the plain optimizer's `state_dict`. Not collective.

        Raises
        ------
        ConfigurationError
            Where the part under ``"mpicomp"`` does not fit.
        """
        kept = state_dict.get("mpicomp")
        if kept is not None:
            if len(kept.get("parts", ())) != len(self._mpicomp_parts):
                raise ConfigurationError(
                    f"{_WHO}: the state has {len(kept.get('parts', ()))} fragments and the optimizer "
                    f"{len(self._mpicomp_parts)}; make it with fragments={len(kept.get('parts', ()))}"
                )
            for part, own in zip(self._mpicomp_parts, kept["parts"], strict=True):
                part.check_fits(own)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "mpicomp"})  # type: ignore[misc]
        if kept is not None:
            for part, own in zip(self._mpicomp_parts, kept["parts"], strict=True):
                part.load_state_dict(own)
            self._mpicomp_steps = int(kept["steps"])
            if self._mpicomp_chooses:
                self._mpicomp_every = int(kept["every"])

    def close(self) -> None:
        """Release its MPI resources. It waits for nobody; a second call does nothing."""
        self._mpicomp_closed = True
        if self._mpicomp_thread is not None:
            self._mpicomp_thread.stop()
            self._mpicomp_thread = None
        for part in self._mpicomp_parts:
            part.reducer.close()
        if self._mpicomp_owned:
            self._mpicomp_transport.close()


@dataclass
class _Joined:
    """State of `_Updating.join`.

    Attributes
    ----------
    batches : int
        Steps that this rank has made with batches since the last exchange.
    met : bool
        Whether ranks have compared that all of them may run out of batches.
    over : bool
        Whether no rank has had any since the exchange before.
    """

    batches: int = 0
    met: bool = False
    over: bool = False


def _check(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    every: int | str,
    compressor: Compressor | str | Mapping[str, Any] | None,
    outer: Mapping[str, Any] | None,
    late: int,
    fragments: int,
    compare_every: int,
) -> tuple[list[tuple[str, torch.Tensor]], dict[str, torch.Tensor], Compressor | None]:
    """Refuse settings that cannot be served; return names, the optimizer's parameters by name, and the compressor."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"{_WHO}: a torch optimizer is needed, got {type(optimizer).__name__}")
    closed = isinstance(optimizer, _Updating) and optimizer._mpicomp_closed
    if isinstance(optimizer, Exchanging | Wrapped) and not closed:
        raise ConfigurationError(f"{_WHO}: {type(optimizer).__name__} exchanges already; pass a plain optimizer")
    if every == AUTO and (late or fragments != 1):
        raise ConfigurationError(
            f"{_WHO}: every='{AUTO}' chooses anew after each exchange, which late and fragments are fractions of; "
            "name a number, or leave them out"
        )
    most = 1 if isinstance(every, str) else every
    if isinstance(every, str) and every != AUTO:
        raise ConfigurationError(f"{_WHO}: every must be a whole number of at least 1, or '{AUTO}', got {every!r}")
    for name, value, least in (("every", most, 1), ("late", late, 0), ("fragments", fragments, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{_WHO}: {name} must be a whole number of at least {least}, got {value!r}")
    if fragments > most:
        raise ConfigurationError(f"{_WHO}: fragments must be at most every={most}, got {fragments}")
    if late > most // fragments:
        raise ConfigurationError(
            f"{_WHO}: late must be at most every // fragments = {most // fragments}, so that one exchange ends before "
            f"the next begins, got {late}"
        )
    check_every(_WHO, compare_every)
    if outer is not None:
        unknown = sorted(set(outer) - set(_OUTER)) if isinstance(outer, Mapping) else [outer]
        if unknown:
            raise ConfigurationError(f"{_WHO}: outer must have some of {', '.join(_OUTER)}, got {unknown[0]!r}")
        if not isinstance(outer.get("sign", False), bool):
            raise ConfigurationError(f"{_WHO}: outer['sign'] must be True or False, got {outer['sign']!r}")
        if outer.get("sign") and outer.get("momentum"):
            raise ConfigurationError(
                f"{_WHO}: outer has momentum and takes the sign of changes, which have no scale any more; leave "
                "momentum out: residuals are one, with feedback_decay"
            )
        try:
            torch.optim.SGD([torch.zeros(1)], **{name: own for name, own in outer.items() if name != "sign"})
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{_WHO}: outer: {error}") from None
    chosen = None if compressor is None else get_compressor(compressor)
    if chosen is not None and chosen.entry.momentum:
        raise ConfigurationError(
            f"{_WHO}: {chosen!r} applies momentum to gradients, and what is exchanged here are changes of parameters, "
            "which the optimizer's own momentum is part of; set momentum=0 in it"
        )
    named = list(named_parameters)
    parameters = parameters_of(optimizer, named, _WHO)
    if fragments > len(parameters):
        raise ConfigurationError(f"{_WHO}: fragments must be at most {len(parameters)}, as many as parameters")
    return named, parameters, chosen


def _cut(parameters: Mapping[str, torch.Tensor], fragments: int) -> list[dict[str, torch.Tensor]]:
    """Cut parameters into consecutive parts of about equal size, none of them empty."""
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(fragments)]
    left = sum(parameter.numel() for parameter in parameters.values())
    place, filled = 0, 0
    for index, (name, parameter) in enumerate(parameters.items()):
        need = fragments - place - 1  # parts that are still empty behind this one
        enough = filled + parameter.numel() / 2 >= left / (need + 1)
        if parts[place] and need and (enough or len(parameters) - index <= need):
            left, filled, place = left - filled, 0, place + 1
        parts[place][name] = parameter
        filled += parameter.numel()
    return parts


def _copy_of(policy: Policy | str | Mapping[str, Any] | None) -> Any:
    """Return what makes a policy like this one: an object serves one reducer alone."""
    return policy.get_config() if isinstance(policy, Policy) else policy


def _is_finite(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(values).all())
