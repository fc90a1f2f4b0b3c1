"""The optimizer that `mpicomp.torch.UpdateOptimizer` makes: it exchanges what its steps have changed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mpicomp.errors import ConfigurationError
from mpicomp.reducer import Reducer
from mpicomp.rounds import Rounds
from mpicomp.torch.comparing import share
from mpicomp.torch.named import named_group
from mpicomp.torch.shared_parameters import SharedParameters
from mpicomp.torch.states import to_tensors, with_names
from mpicomp.torch.step_watch import StepWatch
from mpicomp.torch.wrapped import Arguments, Wrapped
from mpicomp.transport import Transport
from mpicomp.transport.interleave import ProgressThread

WHO = "UpdateOptimizer"


class Updating(Wrapped):
    """Mixin that `UpdateOptimizer` puts in front of an optimizer's class: it exchanges changes after its steps."""

    param_groups: list[dict[str, Any]]
    _mpicomp_names: dict[int, str]
    _mpicomp_steps: int
    _mpicomp_chooses: bool  # whether the policy says how many steps there are to an exchange
    _mpicomp_every: int
    _mpicomp_delay: int
    _mpicomp_parts: list[SharedParameters]
    _mpicomp_thread: ProgressThread | None
    _mpicomp_skips: bool
    _mpicomp_transport: Transport
    _mpicomp_owned: bool
    _mpicomp_closed: bool
    _mpicomp_watch: StepWatch
    _mpicomp_hooks: list[Any]
    _mpicomp_exchanges = True
    _mpicomp_idle = False
    _mpicomp_joined: "Joined | None" = None
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
    def sync_every(self) -> int:
        """Steps from one exchange to the next."""
        return self._mpicomp_every

    @property
    def overlaps(self) -> bool:
        """Whether a thread exchanges while later steps are computed."""
        return self._mpicomp_thread is not None

    def shared(self) -> dict[str, torch.Tensor]:
        """Return the shared parameters by name, the same bits on all ranks; not to be written to."""
        return {name: shared for part in self._mpicomp_parts for name, shared in part.shared().items()}

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
            raise ConfigurationError(f"{WHO}: join() inside of join(); put the whole loop into one")
        self._mpicomp_joined = joined = Joined()
        try:
            yield
            self._mpicomp_idle = True
            while not joined.over:
                self.step()
        finally:
            self._mpicomp_joined, self._mpicomp_idle = None, False
            for part in self._mpicomp_parts:
                part.part()

    def rounds(self, closure: Callable[[], Any] | None = None) -> Rounds[Any]:
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

    def synchronizing(self) -> Rounds[None]:
        """Do what `synchronize` does as a generator of rounds, for ranks that live in one process."""
        for part in self._mpicomp_parts:
            if part.under_way:
                part.finish()
        for part in self._mpicomp_parts:
            if not part.fresh:
                yield from part.exchange_now(self._mpicomp_lr())

    def _mpicomp_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Take over what a script has written to parameters, and hide gradients that are not finite."""
        self._mpicomp_watch.begin_step()
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
        self._mpicomp_watch.stepped()
        scaled, gradients = self._mpicomp_hidden
        for part in self._mpicomp_parts:
            part.follow()
        self.__dict__.update(scaled)  # the scaler removes them
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self._mpicomp_hidden = {}, []
        self._mpicomp_steps += 1
        if self._mpicomp_joined is not None and not self._mpicomp_idle:
            self._mpicomp_joined.batches += 1
        if self._mpicomp_exchanges:
            self._mpicomp_transport.run(self._mpicomp_rounds())

    def _mpicomp_rounds(self) -> Rounds[None]:
        """Take up what has come, and begin what is due. As rounds."""
        every, delay, lr = self._mpicomp_every, self._mpicomp_delay, self._mpicomp_lr()
        ages = [
            (self._mpicomp_steps + place * every // len(self._mpicomp_parts)) % every
            for place in range(len(self._mpicomp_parts))
        ]
        if self._mpicomp_joined is not None and 0 in ages:
            yield from self._mpicomp_meet(self._mpicomp_joined)
            if self._mpicomp_joined.over:
                return
        for part, age in zip(self._mpicomp_parts, ages, strict=True):
            if part.under_way and age == delay % every:
                part.finish()
        for part, age in zip(self._mpicomp_parts, ages, strict=True):
            if age == 0:
                yield from part.start(lr, self._mpicomp_thread) if delay else part.exchange_now(lr)
        if self._mpicomp_chooses and ages == [0]:
            self._mpicomp_steps, self._mpicomp_every = 0, self.reducer.local_steps

    def _mpicomp_meet(self, joined: "Joined") -> Rounds[None]:
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

        Those that were not among ``named_parameters`` are given with their names, as ``{"params":
        head.named_parameters(prefix="head")}``. After ``close()`` no name is needed.

        Raises
        ------
        ConfigurationError
            Where one has no name.
        """
        plain, new = named_group(self, param_group, self._mpicomp_names, WHO, self._mpicomp_closed)
        super().add_param_group(plain)  # type: ignore[misc]
        if not self._mpicomp_closed:
            self._mpicomp_names |= {id(parameter): name for name, parameter in new.items()}
            self._mpicomp_parts[-1].add(new)
            self._mpicomp_hooks += self._mpicomp_watch.hooks_of(new)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with the shared parameters and the reducers' states under ``"mpicomp"``.

        Raises
        ------
        ConfigurationError
            Where an exchange is under way.
        """
        if any(part.under_way for part in self._mpicomp_parts):
            raise ConfigurationError(
                f"{WHO}: an exchange is under way; call synchronize() on all ranks before state_dict()"
            )
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        own = {
            "steps": self._mpicomp_steps,
            "sync_every": self._mpicomp_every,
            "parts": [part.state_dict() for part in self._mpicomp_parts],
        }
        return state | {"mpicomp": to_tensors(own)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, or one of the plain optimizer's `state_dict`. Not collective.

        Raises
        ------
        ConfigurationError
            Where the part under ``"mpicomp"`` does not fit.
        """
        kept = with_names(state_dict.get("mpicomp"))
        if kept is not None:
            if len(kept.get("parts", ())) != len(self._mpicomp_parts):
                raise ConfigurationError(
                    f"{WHO}: the state has {len(kept.get('parts', ()))} fragments and the optimizer "
                    f"{len(self._mpicomp_parts)}; make it with fragments={len(kept.get('parts', ()))}"
                )
            for part, own in zip(self._mpicomp_parts, kept["parts"], strict=True):
                part.check_fits(own)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "mpicomp"})  # type: ignore[misc]
        if kept is None:
            for part in self._mpicomp_parts:
                part.load_moments(None)
        else:
            for part, own in zip(self._mpicomp_parts, kept["parts"], strict=True):
                part.load_state_dict(own)
            self._mpicomp_steps = int(kept["steps"])
            if self._mpicomp_chooses:
                self._mpicomp_every = int(kept["sync_every"])

    def close(self) -> None:
        """Release its MPI resources. It waits for nobody; a second call does nothing."""
        self._mpicomp_closed = True
        while self._mpicomp_hooks:
            self._mpicomp_hooks.pop().remove()
        if self._mpicomp_thread is not None:
            self._mpicomp_thread.stop()
            self._mpicomp_thread = None
        for part in self._mpicomp_parts:
            part.close()
        if self._mpicomp_owned:
            self._mpicomp_transport.close()


@dataclass
class Joined:
    """State of `Updating.join`.

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


def _is_finite(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(values).all())
