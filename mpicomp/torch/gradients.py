"""Averaging of the gradients that backward leaves in ``.grad``: while backward goes on, or after it."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpicomp.errors import ConfigurationError, DisagreementError, MpicompError, RankFailedError, warn_user
from mpicomp.reducer import Reducer
from mpicomp.reducer.agreement import Signature, agree
from mpicomp.reducer.beside import Beside, Given
from mpicomp.reducer.stream import Stream
from mpicomp.rounds import Group, Rounds
from mpicomp.torch.comparing import DRIFT_ADVICE, Fingerprint, check_same, ranks_named, share, sum_of_bits
from mpicomp.torch.named import as_real, described
from mpicomp.torch.overlap import overlap_thread
from mpicomp.torch.replica_checks import SettingsCheck
from mpicomp.torch.sparse_gradients import as_sparse, mean_of_sparse
from mpicomp.torch.step_watch import StepWatch
from mpicomp.transport.base import Value
from mpicomp.transport.interleave import ProgressThread

_WHO = "DistributedOptimizer"
_TRIAL_STEPS = 2  # steps that are exchanged after backward while it is watched whether they could be during it
_OBSTACLES = {
    1: (
        "backward came to a gradient twice before step(), as with several losses or an accumulation",
        "put every backward but the last one into `with optimizer.accumulate():`",
    ),
    2: (
        "a gradient was changed between backward() and step(), as by clipping",
        "call optimizer.synchronize() first: then means are changed, the same on all ranks",
    ),
    3: (
        "zero_grad() came between backward() and step()",
        "clear gradients after the step, or run a backward that is not stepped inside optimizer.accumulate()",
    ),
}
_TWICE, _CHANGED, _CLEARED = _OBSTACLES
"""Reasons for which gradients cannot be exchanged while backward goes on, and what would allow it."""

_JOIN_ADVICE = (
    "while some ranks had no batches left, others changed it beside the optimizer's step: do so in a hook of "
    "register_step_post_hook, which runs on all ranks"
)
_NO_GRADIENT, _DENSE, _SPARSE = range(3)

_joined: "Gradients | None" = None
"""Those of the optimizer whose ranks may run out of batches now, in this process."""


class Gradients(Beside):
    """The gradients of some parameters, and their averaging.

    Making them is collective over the reducer's ranks, as is `average`.

    Parameters
    ----------
    reducer : Reducer
        Averages them.
    parameters : mapping of str to torch.Tensor
        By name, in the model's order; backward fills them from the last to the first.
    settings : SettingsCheck
        Compares the settings of the ranks' optimizers.
    overlap : bool or None
        Whether buckets are exchanged while backward goes on, see `overlap_thread`. With None the first steps are
        exchanged after backward, and so are all others once a script does what True refuses.
    loss_scale : callable, optional
        Gives what the loss, and with it every gradient, is multiplied by.
    compare_every, same_batches
        See `Fingerprint`.

    Attributes
    ----------
    averaged : bool
        Whether ``.grad`` holds means.
    idle : bool
        Whether this rank has no batches left: its gradients are zeros, whatever ``.grad`` holds.
    closed : bool
        Whether it was closed.
    optimizer_state : callable
        Returns the optimizer's state by parameter and key.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: Mapping[str, torch.Tensor],
        settings: SettingsCheck,
        overlap: bool | None = None,
        loss_scale: Callable[[], float] | None = None,
        compare_every: int = 0,
        same_batches: bool = False,
    ) -> None:
        self.averaged = False
        self.closed = False
        self._reducer = reducer
        self._parameters = dict(reversed(list(parameters.items())))
        self._known = {id(parameter) for parameter in parameters.values()}
        self._loss_scale = loss_scale
        self._fingerprint = Fingerprint(compare_every, _WHO, same_batches)
        self._settings = settings
        self._step_watch = StepWatch(_WHO)
        self._frozen_with_gradient: set[str] = set()  # on some rank, in the last step; the same on all ranks
        self.optimizer_state: Callable[[], dict[str, torch.Tensor]] = dict
        self._state_was_loaded = False  # and not compared yet
        self._loaded_residuals = np.int64(0)
        self._rows: set[str] = set()
        self._rows_means: dict[str, tuple[NDArray[np.int64], NDArray[np.floating]] | None] = {}
        self._agreed: list[str] | None = None  # names that all ranks have compared
        self._compared = False  # whether values were, too
        self._problem: MpicompError | None = None
        self._accumulating = False
        self._hooks: dict[str, Any] = {}
        self._generation = reducer.transport.generation
        self._thread, left_open = overlap_thread(reducer, overlap)
        self._overlap = None if left_open else overlap
        self._trial_steps = _TRIAL_STEPS if left_open else 0
        self._obstacle = 0
        self._stream: Stream | None = None
        self._seen: dict[str, tuple[torch.Tensor, tuple[int, int]]] = {}  # what was handed over, and in which state
        self._exchanges = 0
        self._noted: dict[str, tuple[torch.Tensor | None, int | None]] = {}  # what was averaged, and in which state
        self._settings_at_join: dict[str, Any] | None = None  # where ranks may run out of batches
        self._meeting = self._met = False  # whether ranks compare that they all may, and have done so
        self._asked = False  # whether ranks have said in this step who has batches
        self._drifting = False  # whether some rank has taken a step without batches
        self._active = np.ones(reducer.transport.group.size, bool)
        self._watch()
        self._finalizer = weakref.finalize(self, _let_go, self._hooks, self._thread)
        self._finalizer.atexit = False

    @property
    def overlaps(self) -> bool:
        """Whether buckets are exchanged while backward goes on."""
        return self._thread is not None and not self._trial_steps

    @property
    def under_way(self) -> bool:
        """Whether backward has begun to hand over gradients that were not averaged yet."""
        return bool(self._seen) and self.overlaps

    @property
    def joined(self) -> bool:
        """Whether ranks may run out of batches."""
        return self._settings_at_join is not None

    @property
    def group(self) -> Group:
        """All ranks."""
        return self._reducer.transport.group

    @property
    def first_active(self) -> int:
        """The first rank that has batches in this step."""
        return int(self._active.argmax())

    def add(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Add parameters, on all ranks."""
        self._parameters = dict(reversed(list(parameters.items()))) | self._parameters
        self._known |= {id(parameter) for parameter in parameters.values()}
        self._compared = False
        self._watch()

    def check_known(self, parameters: Iterable[torch.Tensor]) -> MpicompError | None:
        """Return the error where some of these parameters would be trained without an exchange."""
        for parameter in parameters:
            if (parameter.requires_grad or parameter.grad is not None) and id(parameter) not in self._known:
                return ConfigurationError(
                    f"DistributedOptimizer: param_groups holds a parameter of shape {tuple(parameter.shape)} that is "
                    "not exchanged; add parameters with add_param_group, on all ranks"
                )
        return None

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let backward add to gradients without exchanging them."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def cleared(self) -> None:
        """Note that gradients are cleared; not collective."""
        if self._seen and self._overlap:
            raise ConfigurationError(
                f"{_WHO}: zero_grad() came between backward() and step(), when the exchange had begun already; call "
                "synchronize() first, or pass overlap=False"
            )
        if self._seen:
            self._obstacle = self._obstacle or _CLEARED
            if self._trial_steps:
                self._seen.clear()
        self.averaged = False

    def loaded(self, residuals: Iterable[Any]) -> None:
        """Have the optimizer's state, which was loaded, compared in the next step.

        Parameters
        ----------
        residuals : iterable of array
            Those that were loaded, which must be the rank's.
        """
        self._state_was_loaded = True
        self._loaded_residuals = sum_of_bits([torch.as_tensor(residual) for residual in residuals])

    def join(self) -> None:
        """Let ranks run out of batches from now on; not collective.

        The optimizers' settings must be the same on all ranks now. Their names come after ``join()`` in the alphabet,
        so that ranks which do without it are told so first.
        """
        global _joined
        if _joined is not None:
            raise ConfigurationError(
                "join: one optimizer's join() at a time: a rank that has no batches left takes part in the steps of one"
            )
        if self.under_way:
            raise ConfigurationError(
                "join: it began between backward() and step(), when the exchange had begun already; put the whole loop "
                "into it"
            )
        _joined = self
        self._settings_at_join = self._settings.settings()
        self._met = self._asked = self._drifting = False

    def leave(self) -> None:
        """End the context that `join` has begun; not collective."""
        global _joined
        _joined = None
        self._settings_at_join = None
        self._asked = self.idle = self.frozen = False

    def goes_on(self) -> bool:
        """Begin a step of a rank that has no batches left; False where no rank has any. Collective."""
        self.idle = True
        if self.under_way:
            self.average(
                None,
                ConfigurationError(
                    "join: the loop of this rank ended between backward() and step(), when the exchange had begun "
                    "already; step after every backward, or put it into `with optimizer.accumulate():`"
                ),
            )
        self._begin()
        if self._active.any():
            return True
        if self._drifting:
            self.run(self._compare(_JOIN_ADVICE))
        return False

    def average(self, lr: Any, problem: MpicompError | None = None) -> None:
        """Put means into ``.grad``. What no rank has a gradient for is left without one. Collective.

        Parameters
        ----------
        lr : number, tensor of one or None
            For the record, and for the policy.
        problem : MpicompError or None
            What is wrong on this rank: it is raised on all of them.
        """
        with torch.no_grad():
            try:
                self._begin()
                self._problem = problem or self._changed()
                self.stale = self._problem is not None or self._obstacle != 0 or self._state_was_loaded
                if not self.frozen and self.run(self._settings.begin(self.group)):
                    self.stale = True
                held = {name for name, p in self._parameters.items() if p.grad is not None and not p.requires_grad}
                own = self._own()
                self.stale = self.stale or held != self._frozen_with_gradient
                self.stale = self.stale or not self._compared or list(own) != self._agreed
                dense, absent = self._given(own)
                means = self._exchange(dense, lr, absent)
                own = self._own()
            finally:
                self._asked = False
                self._step_watch.stepped()
            record = self._reducer.last_step
            assert record is not None
            factor = 1.0 if self._loss_scale is None else self._loss_scale()
            spoilt = record.skipped and self._loss_scale is not None
            for name, mean in means.items():
                parameter = own[name]
                if parameter.grad is None or parameter.grad.is_sparse or parameter.grad.is_conj():
                    parameter.grad = torch.empty_like(parameter)
                as_real(parameter.grad).copy_(mean)
                if spoilt:
                    parameter.grad.fill_(torch.inf)  # what a GradScaler looks for
                elif factor != 1:
                    parameter.grad.mul_(factor)
            for name, mean_rows in self._rows_means.items():
                if mean_rows is not None:
                    own[name].grad = as_sparse(mean_rows, own[name], record.skipped)
        self._watch()
        self.averaged = True
        self.note()

    def note(self) -> None:
        """Treat the current gradients as those after the exchange."""
        self._noted.clear()
        if self.frozen:
            self._noted |= {
                name: (p.grad, None if p.grad is None else p.grad._version) for name, p in self._own().items()
            }

    def changed(self) -> dict[str, torch.Tensor | None]:
        """Return the gradients that the caller has changed since the exchange, in a step in which some rank is idle."""
        found = {}
        for name, (gradient, version) in self._noted.items():
            own = self._parameters[name].grad
            if own is not gradient or (own is not None and own._version != version):
                found[name] = own
        return found

    def parameter(self, name: str) -> torch.Tensor:
        """Return a parameter."""
        return self._parameters[name]

    def run(self, exchange: Rounds[Value]) -> Value:
        """Run rounds outside of a step. Collective."""
        return self._reducer.transport.run(self._reducer.counted(exchange))

    def agree(self, given: Given) -> Rounds[Given | None]:
        """See `Beside.agree`: parameters, whether they have the same values, and which have sparse gradients."""
        trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        frozen = {name: parameter for name, parameter in self._parameters.items() if not parameter.requires_grad}
        settings = {"compare_every": self._fingerprint.every, "join()": self.joined}
        if self._meeting:
            settings |= self._settings_at_join or {}
        yield from agree(Signature(settings, described(trained)), self._problem, self.group, _WHO)
        if self._meeting:
            return None
        yield from agree(Signature({}, described(frozen)), None, self.group, f"{_WHO}: frozen parameters")
        if not self.frozen:  # ranks without batches take over the settings of one that has some
            yield from self._settings.compare(self.group)
        flags = [not self._compared, self._obstacle, self._state_was_loaded]
        kinds = {name: _kind_of(parameter.grad) for name, parameter in (trained | frozen).items()}
        uncompared, obstacles, loaded, *everyones = (yield from share([*flags, *kinds.values()], self.group)).T
        found = {name: int(ranks.max()) for name, ranks in zip(kinds, everyones, strict=True)}
        self._frozen_with_gradient = {name for name in frozen if found[name] != _NO_GRADIENT}
        if uncompared.any():
            yield from self._compare("call mpicomp.torch.broadcast_parameters(model) before training")
        if loaded.any():
            yield from self._compare_state(loaded)
        self._stop_overlap(obstacles)
        own = self._own()
        self._compared, self._agreed = True, list(own)
        some = {name for name in own if found[name] == _SPARSE}
        self._rows = some | (self._rows & own.keys())  # also of one that nobody has used in this step
        return self._given(own)

    def _compare_state(self, loaded: NDArray[np.uint8]) -> Rounds[None]:
        """Make sure that all ranks go on with the same state of the optimizer, and with residuals of theirs. As rounds.

        ``loaded`` says which ranks have loaded one.
        """
        state, who = self.optimizer_state(), f"{_WHO}: the optimizer's state"
        if not loaded.all():
            who += f", which was loaded on {ranks_named(np.flatnonzero(loaded).tolist())} alone"
        advice = "load the same file on all ranks, or call mpicomp.torch.broadcast_optimizer_state(optimizer)"
        try:
            yield from agree(Signature({}, described(state)), None, self.group, who)
        except DisagreementError as error:
            raise DisagreementError(f"{error}; {advice}") from None
        yield from check_same(state, self.group, who, advice)
        residuals = yield from share(np.array([self._loaded_residuals]).view(np.uint8), self.group)
        ranks = self.group.size
        copied = (
            ranks > 1 and residuals.any() and (residuals == residuals[0]).all() and not self._fingerprint.same_batches
        )
        if copied and self.group.rank == 0:
            warn_user(
                f"{_WHO}: all {ranks} ranks have loaded the residuals of one rank, which then count {ranks} times, and "
                "those of the others are lost; save and load a file of each rank, or delete state['mpicomp'] to start "
                "residuals at zero",
            )
        self._state_was_loaded, self._loaded_residuals = False, np.int64(0)

    def _stop_overlap(self, obstacles: NDArray[np.uint8]) -> None:
        """Exchange after backward from now on where some rank's script does not allow it before."""
        if not obstacles.any():
            return
        self._obstacle, self._overlap, self._trial_steps = 0, False, 0
        rank = int(obstacles.argmax())  # of the largest reason: what several ranks saw may differ
        seen, advice = _OBSTACLES[int(obstacles[rank])]
        if self.group.rank == 0:
            warn_user(
                f"{_WHO}: gradients are exchanged in step() from now on, not while backward goes on: {seen} (seen on "
                f"rank {rank}). What would allow it: {advice}. overlap=False says that it is meant, and overlap=True "
                "refuses it",
            )

    def exchange(self) -> Rounds[bool]:
        """See `Beside.exchange`: rows of sparse gradients. Parameters are compared first, now and then."""
        own = self._own()
        gradients = [] if self.frozen else [p.grad for p in own.values() if p.grad is not None]
        yield from self._fingerprint.look(own, self.group, gradients, _JOIN_ADVICE if self._drifting else DRIFT_ADVICE)
        yield from self._settings.finish(self.group)
        self._rows_means = {}
        for name, parameter in own.items():
            if name in self._rows:
                self._rows_means[name] = yield from mean_of_sparse(
                    None if self.idle else parameter.grad, parameter, self._share_of_active(), self.group
                )
        return all(mean is None or bool(np.isfinite(mean[1]).all()) for mean in self._rows_means.values())

    def close(self) -> None:
        """Release its resources; not collective."""
        self.closed = True
        self._seen.clear()
        self._stream = None
        self._thread = None
        self._finalizer()

    def _own(self) -> dict[str, torch.Tensor]:
        """Return the parameters that are exchanged: those that require a gradient, or that an optimizer would step."""
        held = self._frozen_with_gradient
        return {name: p for name, p in self._parameters.items() if p.requires_grad or name in held}

    def _given(self, own: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], set[str]]:
        """Return the dense gradients, and the names of those that stand for none."""
        dense: dict[str, torch.Tensor] = {}
        absent: set[str] = set()
        for name, parameter in own.items():
            if name in self._rows:
                continue
            if parameter.grad is None or self.idle:
                absent.add(name)
                dense[name] = _zeros_like(parameter)
            else:
                dense[name] = as_real(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
        return dense, absent

    def _exchange(self, dense: dict[str, torch.Tensor], lr: Any, absent: set[str]) -> dict[str, torch.Tensor]:
        """Exchange buckets that are not under way already, and return the means."""
        stream = self._stream
        self._stream = None
        self._seen.clear()
        if stream is None and self.overlaps:
            assert self._thread is not None
            stream = self._reducer.stream(self._thread, self._scale(), self)
        means: dict[str, torch.Tensor] | None = None
        if stream is not None:
            try:
                means = stream.finish(dense, lr, absent)
            except RankFailedError:
                if not self._reducer.survives:
                    raise
        if means is None:
            means = self._reducer.reduce(dense, lr, absent=absent, scale=self._scale(), beside=self)
        if self._reducer.transport.generation != self._generation:
            self._follow()
        self._trial_steps = max(self._trial_steps - 1, 0)
        self._exchanges += 1
        if self._overlap is False and self._thread is not None:
            self._thread.stop()
            self._thread = None
        return means

    def _follow(self) -> None:
        """Go on with the ranks that are left. Collective over these."""
        self._finalizer()
        self._generation = self._reducer.transport.generation
        self._active = np.ones(self.group.size, bool)
        self._thread, _ = overlap_thread(self._reducer, self._overlap)
        self._finalizer = weakref.finalize(self, _let_go, self._hooks, self._thread)
        self._finalizer.atexit = False

    def _begin(self) -> None:
        """Find out which ranks have batches in this step, before the exchange. Collective where ranks may have none.

        A mean is that of the ranks that have: they multiply their gradients, and the others have zeros.
        """
        if _joined is not None and _joined is not self and self.group.size > 1:
            raise ConfigurationError(
                "join: another optimizer than the one that joins is exchanged inside of it, where ranks that have no "
                "batches left do not take part; one optimizer a loop can be served"
            )
        if not self.joined or self._asked:
            return
        if not self._met:
            self._meet()
        self._reducer.transport.doing("join(): who has batches left")
        told = self.run(share([not self.idle], self.group))
        self._active = told[:, 0].astype(bool)
        self._drifting = self._drifting or self.frozen
        self.frozen = not self._active.all()
        self._asked = True

    def _meet(self) -> None:
        """Make sure that all ranks may run out of batches. Collective, also with ranks that are in a plain step."""
        self._meeting = self.stale = True
        self._problem = None
        try:
            self._exchange(*self._zeros())
        finally:
            self._meeting = False
        self._met = True

    def _zeros(self) -> tuple[dict[str, torch.Tensor], None, set[str]]:
        own = {name: parameter for name, parameter in self._own().items() if name not in self._rows}
        return {name: _zeros_like(parameter) for name, parameter in own.items()}, None, set()

    def _compare(self, advice: str) -> Rounds[None]:
        """Make sure that all ranks have the same parameters. As rounds."""
        own = dict(reversed(list(self._own().items())))
        yield from check_same(own, self.group, _WHO, advice)

    def _scale(self) -> float:
        return self._share_of_active() / (1.0 if self._loss_scale is None else self._loss_scale())

    def _share_of_active(self) -> float:
        """Return the factor that turns a mean over all ranks into one over those that have batches."""
        return self.group.size / int(self._active.sum()) if self.frozen else 1.0

    def _watch(self) -> None:
        """Have backward tell when a gradient is complete, for those that require one by now."""
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and name not in self._hooks:
                handle = parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
                self._hooks[name] = handle

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        owner = weakref.ref(self)  # a model may outlive its optimizer

        def hook(parameter: torch.Tensor) -> None:
            own = owner()
            if own is not None:
                own._arrive(name, parameter)

        disable: Callable[[Any], Any] = torch.compiler.disable  # torch.compile would trace into it
        return disable(hook)  # type: ignore[no-any-return]

    def _arrive(self, name: str, parameter: torch.Tensor) -> None:
        self.averaged = False
        if self._accumulating:
            return
        self._step_watch.filled(name, parameter)
        if self._thread is not None:
            assert parameter.grad is not None
            self._hand_over(self._thread, name, parameter.grad)

    def _hand_over(self, thread: ProgressThread, name: str, gradient: torch.Tensor) -> None:
        """Hand over a gradient that is complete; its bucket is exchanged as soon as all of it is there."""
        if name in self._seen:
            if self._overlap:
                raise ConfigurationError(
                    f"gradients: backward has come to '{name}' twice since the last step, and the exchange has begun "
                    "at the first time; put every backward but the last one into `with optimizer.accumulate():`, or "
                    "pass overlap=False"
                )
            self._obstacle = self._obstacle or _TWICE
            return
        if not self._seen and self.overlaps:
            self._begin()
            self._stream = self._reducer.stream(thread, self._scale(), self)
        self._seen[name] = gradient, self._mark(gradient)
        if self._stream is not None and not gradient.is_sparse:
            self._stream.put(name, as_real(gradient.detach()))

    def _mark(self, gradient: torch.Tensor) -> tuple[int, int]:
        """Return what tells whether a gradient was written to since.

        Torch counts no version of what is written through ``.data``. So in the first steps, and after 2, 4, 8 and so
        on, its bits are summed, too.
        """
        looks_closely = self._exchanges & (self._exchanges - 1) == 0
        return gradient._version, int(sum_of_bits([gradient])) if looks_closely else 0

    def _changed(self) -> MpicompError | None:
        """Find gradients that were written to after they were handed over: the change would be lost."""
        for name, (gradient, mark) in self._seen.items():
            if self._parameters[name].grad is not gradient or self._mark(gradient) != mark:
                if not self._overlap:
                    self._obstacle = self._obstacle or _CHANGED
                    return None
                return ConfigurationError(
                    f"gradients: the one of '{name}' was changed between backward() and step(), when its exchange had "
                    "begun already; call optimizer.synchronize() first, or pass overlap=False"
                )
        return None


def _kind_of(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return _NO_GRADIENT
    return _SPARSE if gradient.is_sparse else _DENSE


def _zeros_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros that stand for a gradient, in the memory of one."""
    real = as_real(parameter.detach())
    return real.new_zeros(()).expand(real.shape)


def _let_go(hooks: dict[str, Any], thread: ProgressThread | None) -> None:
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
    if thread is not None:
        thread.stop()
