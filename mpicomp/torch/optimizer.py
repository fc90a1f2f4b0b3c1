"""An optimizer whose gradients are averaged over MPI ranks."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from mpicomp.compressors import Compressor, get_compressor
from mpicomp.errors import ConfigurationError
from mpicomp.policies import Policy
from mpicomp.reducer import Reducer
from mpicomp.reducer.agreement import together
from mpicomp.reducer.layout import LARGE_BUCKET
from mpicomp.reducer.reducer import check_settings
from mpicomp.settings import check_least
from mpicomp.torch.comparing import COMPARE_EVERY
from mpicomp.torch.exchanging import Exchanging
from mpicomp.torch.gradients import Gradients
from mpicomp.torch.join import Join, follow
from mpicomp.torch.named import Named, as_real, named_group, named_of, parameters_of
from mpicomp.torch.replica_checks import SettingsCheck
from mpicomp.torch.states import name_of, to_arrays, to_tensors
from mpicomp.torch.wrapped import Arguments, Wrapped, check_no_ddp, unwrap, warn_of_nested, wrap
from mpicomp.transport import Transport
from mpicomp.transport.connect import connect

_SMALL_BUCKET = 8 << 20  # bytes of a bucket whose elements all travel


def DistributedOptimizer(  # noqa: N802, a factory that reads like the class that it stands for
    optimizer: torch.optim.Optimizer,
    named_parameters: Named,
    compressor: Compressor | str | Mapping[str, Any] | None = None,
    collective: str = "auto",
    policy: Policy | str | Mapping[str, Any] | None = None,
    *,
    feedback: bool | None = None,
    nonfinite: str = "raise",
    comm: Any = None,
    overlap: bool | None = None,
    scaler: torch.amp.GradScaler | None = None,
    bucket_bytes: int | None = None,
    warmup: int | str | None = None,
    compare_every: int = COMPARE_EVERY,
    same_batches: bool = False,
    **settings: Any,
) -> Any:
    """Make an optimizer average its gradients over the ranks, compressed, before every step.

    Collective over ``comm``, as are the steps of what it returns: all ranks step together. A parameter without a
    gradient takes part with zeros, so that all ranks exchange the same arrays whatever their batches touched; one that
    has none on any rank is left without, as it would be in a single process. Sparse gradients are averaged row by
    row, uncompressed.

    Gradients are exchanged while backward goes on: a bucket as soon as backward has come to all that is in it. For
    that they must not be written to before ``step()`` or ``synchronize()``, and backward comes to each once a step,
    unless it runs inside `accumulate`.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any optimizer that reads gradients once a step. LBFGS calls for them many times: see `UpdateOptimizer`.
    named_parameters : iterable of (str, torch.Tensor), mapping or torch.nn.Module
        ``model.named_parameters()`` or the model: every parameter of the optimizer that requires a gradient has to be
        among them. Parameters that are in no group of the optimizer are left out. Complex ones are exchanged as pairs
        of reals: their residuals have a last dimension of 2.
    compressor, collective, policy, feedback, nonfinite, comm, warmup
        See `mpicomp.Reducer`.
    overlap : bool, optional
        False exchanges everything in ``step()``. True exchanges while backward goes on, and refuses a script that does
        not allow it. None does it where it can: the first two steps are exchanged in ``step()`` and watched, and once
        the script writes to gradients before ``step()``, clears them or runs backward twice, all are, with a warning.
        So they are where all ranks are on one host and torch's threads take all of its cores: there nothing is waited
        for, and the exchange would only take turns with backward. So it is in any case, with a warning, where MPI was
        started with less than MPI_THREAD_MULTIPLE.
    scaler : torch.amp.GradScaler, optional
        What the loss is scaled with. ``scaler.unscale_(optimizer)`` and ``scaler.step(optimizer)`` then average
        gradients first, and a step in which some rank's overflowed is left out on all of them, residuals as they were.
    bucket_bytes : int, optional
        See `mpicomp.Reducer`. None leaves it to mpicomp where that chooses the exchange too. Else it takes 32 MiB where
        elements are selected, since such an exchange is mostly cost that does not grow with a bucket, and 8 MiB
        elsewhere, so that the exchange begins early in backward.
    compare_every : int
        Most steps from one comparison of the ranks' parameters to the next, bit for bit; the first ones are after steps
        1, 2, 4, 8 and so on. 0 compares before the first step alone.
    same_batches : bool
        True says that ranks are meant to draw the same batches. Else there is a warning where the gradients of the
        first steps were the same on all of them.
    **settings
        Further settings of `mpicomp.Reducer`.

    Returns
    -------
    torch.optim.Optimizer
        The same optimizer, which from now on is of a class derived from its own: schedulers, hooks and steps that were
        put into it, before or later, work as before. It has ``reducer``, a `mpicomp.Reducer`;
        ``synchronize()``, which averages the gradients now, so that they can be clipped before ``step()``;
        ``accumulate()``, a context in which backward adds to gradients and nothing is exchanged; ``join()``, a context
        for ranks with different numbers of batches; ``overlaps``, whether
        gradients are exchanged while backward goes on; and ``close()``, which ``with`` calls at its end. Its
        ``state_dict()`` has what the reducer keeps on this rank under ``"mpicomp"``. It can be neither copied nor
        pickled, since it holds a communicator; after ``close()`` it can be wrapped anew.

    Raises
    ------
    ConfigurationError
        For an optimizer or parameters that cannot be served.
    DisagreementError
        Where parameters have other values on some rank, see ``compare_every``, and in every step in which the class or
        a setting of the optimizer, such as its learning rate, is another one on some rank.

    Examples
    --------
    >>> import torch
    >>> from mpicomp.transport import LocalWorld
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = DistributedOptimizer(
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     named_parameters=model.named_parameters(),
    ...     compressor="topk",
    ...     warmup=0,
    ...     comm=LocalWorld(1).transports[0],
    ... )
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> isinstance(optimizer, torch.optim.SGD), optimizer.reducer.last_step.buckets[0].collective
    (True, 'allgather')
    """
    transport = connect(comm)
    try:
        named, parameters, chosen = together(
            lambda: _check(
                optimizer, named_parameters, compressor, compare_every, settings, scaler, transport.group.size
            ),
            transport,
            "DistributedOptimizer",
        )
        if scaler is not None:
            nonfinite = "skip"
        if bucket_bytes is None and chosen is not None:
            selects = chosen.message in ("sparse", "shared")
            bucket_bytes = LARGE_BUCKET if selects else _SMALL_BUCKET
        settings |= {"bucket_bytes": bucket_bytes, "warmup": warmup}
        reducer = Reducer(chosen, collective, policy, feedback, nonfinite, transport, **settings)
    except BaseException:
        if transport is not comm:
            transport.close()
        raise
    loss_scale = None if scaler is None else scaler.get_scale
    check = SettingsCheck(optimizer, "DistributedOptimizer")
    gradients = Gradients(reducer, parameters, check, overlap, loss_scale, compare_every, same_batches)
    if isinstance(optimizer, Wrapped):
        unwrap(optimizer)
    wrapped = wrap(optimizer, _Distributed, "Distributed")
    wrapped.reducer = reducer
    wrapped._mpicomp_names = {id(parameter): name_of(name) for name, parameter in named}
    wrapped._mpicomp_scaler = scaler
    wrapped._mpicomp_gradients = gradients
    owner: Callable[[], Any] = weakref.ref(wrapped)
    gradients.optimizer_state = lambda: owner()._mpicomp_state()
    wrapped._mpicomp_transport = None if transport is comm else transport
    if scaler is not None:
        _follow(scaler, wrapped)
    return wrapped


class _Distributed(Wrapped):
    """Mixin that `DistributedOptimizer` puts in front of an optimizer's class: it averages gradients before a step."""

    reducer: Reducer
    param_groups: list[dict[str, Any]]
    state: dict[torch.Tensor, Any]
    _mpicomp_names: dict[int, str]
    _mpicomp_scaler: torch.amp.GradScaler | None
    _mpicomp_gradients: Gradients
    _mpicomp_transport: Transport | None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Have a GradScaler that was not named call step() on all ranks, with ``found_inf`` set.

        It would leave step() out where this rank's gradients overflowed, and the others would wait for it.
        """
        return self._mpicomp_scaler is None

    @property
    def overlaps(self) -> bool:
        """Whether gradients are exchanged while backward goes on."""
        return self._mpicomp_gradients.overlaps

    def synchronize(self) -> None:
        """Average the gradients over the ranks now; the next ``step()`` does not do it again. Collective."""
        lr = self.param_groups[0].get("lr")
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        problem = self._mpicomp_gradients.check_known(parameters)
        self._mpicomp_gradients.average(lr.detach() if isinstance(lr, torch.Tensor) else lr, problem)

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context in which backward adds to gradients without exchanging them."""
        return self._mpicomp_gradients.accumulate()

    def join(self) -> AbstractContextManager[None]:
        """Return a context for a loop that has more batches on some ranks than on others, on all ranks.

        Where the loop of a rank is over, the end of the context takes part in the steps of the others, with zeros and
        what its residuals hold, until all are done. Means are those of the ranks that have batches. While some rank has
        none, policies leave plans as they are. If an error leaves the loop, the context communicates nothing.

        Raises
        ------
        ConfigurationError
            Inside of another one, or where another optimizer is exchanged inside of it.
        DisagreementError
            At the first step, on all ranks, where some rank makes it without ``join()``, or with other settings of its
            parameter groups; at the end, where parameters were changed beside the steps.
        """
        return Join(self, self._mpicomp_gradients, self._mpicomp_scaler)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over the ranks, then step. Collective.

        A closure is called once, before the gradients are averaged, and its value is given back.
        """
        own_step = super(Wrapped, self).step  # type: ignore[misc]

        def step(called: Callable[[], Any] | None = None) -> Any:
            value = own_step()  # it gets no closure: one that calls it for other gradients would not notice
            return value if called is None else called()

        return self._mpicomp_step(step, *(() if closure is None else (closure,)))

    step.hooked = True  # type: ignore[attr-defined]

    def _mpicomp_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Call the closure, and average the gradients that it has left."""
        gradients = self._mpicomp_gradients
        if hasattr(self, "found_inf") and self._mpicomp_scaler is None:
            raise ConfigurationError(
                "DistributedOptimizer: this rank alone cannot tell whether gradients that a GradScaler has scaled "
                "overflowed; pass scaler= to DistributedOptimizer, or use torch.autocast with bfloat16, which needs "
                "no scaler"
            )
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:
            gradients.averaged = False
            with torch.enable_grad():
                loss = closure()  # it may synchronize and clip by itself, as Lightning's does
            called = _Called(loss)
            args, kwargs = ((called, *args[1:]), kwargs) if args else (args, kwargs | {"closure": called})
        if not gradients.averaged:
            self.synchronize()
        gradients.averaged = False
        if gradients.frozen:
            gradients.run(follow(self, gradients))
        return args, kwargs

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; see `torch.optim.Optimizer.zero_grad`."""
        self._mpicomp_gradients.cleared()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see `torch.optim.Optimizer.add_param_group`. On all ranks, between two steps.

        Those that were not among ``named_parameters`` are given with their names, as ``{"params":
        head.named_parameters(prefix="head")}``. After ``close()`` no name is needed.

        Raises
        ------
        ConfigurationError
            Where one has no name.
        """
        closed = self._mpicomp_gradients.closed
        plain, new = named_group(self, param_group, self._mpicomp_names, "DistributedOptimizer", closed)
        super().add_param_group(plain)  # type: ignore[misc]
        if not closed:
            self._mpicomp_names |= {id(parameter): name for name, parameter in new.items()}
            self._mpicomp_gradients.add(new)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with this rank's state of the reducer under ``"mpicomp"``."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return state | {"mpicomp": to_tensors(self.reducer.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, or one of the plain optimizer's `state_dict`. Not collective.

        Raises
        ------
        ConfigurationError
            Where the reducer's part does not fit.
        """
        kept = to_arrays(state_dict.get("mpicomp"))
        if kept is not None:
            self._check_fits(kept)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "mpicomp"})  # type: ignore[misc]
        if kept is not None:
            self.reducer.load_state_dict(kept)
        self._mpicomp_gradients.loaded([] if kept is None else kept["residuals"].values())

    def _mpicomp_state(self) -> dict[str, torch.Tensor]:
        """Return tensors and numbers in the optimizer's state by parameter and key."""
        found = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                for key, value in self.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor | bool | int | float):
                        found[f"{self._mpicomp_names[id(parameter)]}, {key}"] = torch.as_tensor(value)
        return found

    def close(self) -> None:
        """Release the reducer's MPI resources. It waits for nobody; a second call does nothing."""
        self._mpicomp_gradients.close()
        self.reducer.close()
        if self._mpicomp_transport is not None:
            self._mpicomp_transport.close()

    def _check_fits(self, kept: Mapping[str, Any]) -> None:
        """Refuse residuals of another model: nothing was loaded yet."""
        shapes = {
            self._mpicomp_names[id(parameter)]: tuple(as_real(parameter.detach()).shape)
            for group in self.param_groups
            for parameter in group["params"]
        }
        for name, residual in kept.get("residuals", {}).items():
            if shapes.get(name) != tuple(residual.shape):
                has = f"shape {shapes[name]}" if name in shapes else "no such parameter"
                raise ConfigurationError(
                    f"DistributedOptimizer: the state is of another model: it has a residual of shape "
                    f"{tuple(residual.shape)} for '{name}', and this model has {has}; delete state['mpicomp'] to start "
                    "residuals at zero"
                )


class _Called:
    """A closure that was called: it gives its value, once."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._asked = False

    def __call__(self) -> Any:
        if self._asked:
            raise ConfigurationError(
                "DistributedOptimizer: the optimizer calls its closure several times in a step; use "
                "mpicomp.torch.UpdateOptimizer, which serves it and exchanges what its steps have changed"
            )
        self._asked = True
        return self._value


class _AveragesFirst:
    """Mixin of a GradScaler: it averages gradients before it checks them, so that it finds the same on all ranks."""

    _mpicomp_optimizer: Callable[[], Any]

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Average gradients of the distributed optimizer, then unscale them."""
        self._mpicomp_average(optimizer)
        super().unscale_(optimizer)  # type: ignore[misc]
        if optimizer is self._mpicomp_optimizer():
            optimizer._mpicomp_gradients.note()

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Average gradients of the distributed optimizer, then step, or not."""
        self._mpicomp_average(optimizer)
        return super().step(optimizer, *args, **kwargs)  # type: ignore[misc]

    def update(self, new_scale: Any = None) -> None:
        """Update the scale: gradients of a step that was left out are averages no longer."""
        optimizer = self._mpicomp_optimizer()
        if optimizer is not None:
            optimizer._mpicomp_gradients.averaged = False
        super().update(new_scale)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy it as the GradScaler that it was."""
        state = {key: value for key, value in self.__getstate__().items() if key != "_mpicomp_optimizer"}  # type: ignore[attr-defined]
        return object.__new__, (type(self).__bases__[1],), state

    def _mpicomp_average(self, optimizer: Any) -> None:
        if optimizer is self._mpicomp_optimizer() and not optimizer._mpicomp_gradients.averaged:
            optimizer.synchronize()


def _follow(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    """Have a GradScaler average gradients of an optimizer before it checks them."""
    changed: Any = scaler
    kind = type(scaler)
    if not isinstance(scaler, _AveragesFirst):
        changed.__class__ = type(f"Distributed{kind.__name__}", (_AveragesFirst, kind), {})
    changed._mpicomp_optimizer = weakref.ref(optimizer)


def _check(
    optimizer: Any,
    named_parameters: Named,
    compressor: Compressor | str | Mapping[str, Any] | None,
    compare_every: int,
    settings: Mapping[str, Any],
    scaler: torch.amp.GradScaler | None,
    ranks: int,
) -> tuple[list[tuple[str, torch.Tensor]], dict[str, torch.Tensor], Compressor | None]:
    """Refuse settings that cannot be served; return names, the optimizer's parameters by name, and the compressor."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"DistributedOptimizer: a torch optimizer is needed, got {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        if not optimizer._mpicomp_gradients.closed:
            raise ConfigurationError("DistributedOptimizer: this optimizer is distributed already; close() it first")
    elif isinstance(optimizer, Exchanging | Wrapped):
        raise ConfigurationError(
            f"DistributedOptimizer: {type(optimizer).__name__} exchanges by itself; use it as it is"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "DistributedOptimizer: LBFGS asks for gradients many times in a step; use mpicomp.torch.UpdateOptimizer, "
            "which serves it and exchanges what its steps have changed"
        )
    check_least("DistributedOptimizer", "compare_every", compare_every, 0)
    chosen = None if compressor is None else get_compressor(compressor)
    own = [group["momentum"] for group in optimizer.param_groups if group.get("momentum")]
    if chosen is not None and chosen.entry.momentum and own:
        raise ConfigurationError(
            f"DistributedOptimizer: {chosen!r} applies momentum before the exchange, and the optimizer would "
            f"apply its own, {own[0]}, once more; set momentum=0 in one of them"
        )
    check_settings(settings, compressor, "DistributedOptimizer")
    named = named_of(named_parameters, "DistributedOptimizer", ranks)
    parameters = parameters_of(optimizer, named, "DistributedOptimizer")
    if scaler is not None:
        for name, parameter in parameters.items():
            if parameter.is_complex():
                raise ConfigurationError(
                    f"DistributedOptimizer: a GradScaler of torch takes no complex gradients, and '{name}' is of "
                    f"{str(parameter.dtype).removeprefix('torch.')}; use torch.autocast with bfloat16, which needs no "
                    "scaler"
                )
    check_no_ddp(parameters, ranks, "DistributedOptimizer")
    warn_of_nested(optimizer, "DistributedOptimizer")
    return named, parameters, chosen
