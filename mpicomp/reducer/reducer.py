"""The reducer: gradients in, their mean over ranks out, and nothing lost in between."""

import functools
import inspect
import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp import plugins
from mpicomp.compressors import Compressor, get_compressor
from mpicomp.cost import CostModel
from mpicomp.errors import ClosedError, ConfigurationError, RankFailedError, UnknownNameError
from mpicomp.policies import Policy, UserSettings, get_policy
from mpicomp.policies.warmup import WarmUp, choose_warmup
from mpicomp.reducer.agreement import together
from mpicomp.reducer.beside import Beside
from mpicomp.reducer.core import Core, Loaded
from mpicomp.reducer.layout import LARGE_BUCKET, Layout
from mpicomp.reducer.pace import Pace
from mpicomp.reducer.record import StepRecord, Value
from mpicomp.reducer.step import AGREED, Step
from mpicomp.reducer.stream import Stream
from mpicomp.reducer.survivors import common_state, leave_the_dead
from mpicomp.reducer.telemetry import Telemetry
from mpicomp.rounds import Rounds
from mpicomp.transport import Transport
from mpicomp.transport.connect import connect
from mpicomp.transport.scheduler import ProgressThread

_NONFINITE = ("raise", "skip", "pass")
_ON_FAILURE = ("abort", "shrink")
_SCHEMA = 1
Settings = ParamSpec("Settings")


def _with_known_settings(
    make: Callable[Concatenate["Reducer", Settings], None],
) -> Callable[Concatenate["Reducer", Settings], None]:
    """Let a reducer refuse keywords that it does not have in the project's words, not in Python's."""

    @functools.wraps(make)
    def checked(self: "Reducer", /, *args: Settings.args, **settings: Settings.kwargs) -> None:
        check_settings(settings, args[0] if args else settings.get("compressor"), "reducer")
        make(self, *args, **settings)

    return checked


class Reducer:
    """Averages named gradients over ranks, compressed, with error feedback.

    To rounding, over all ranks: sum of ``gradient + residual before`` equals ``ranks x mean`` plus sum of ``residual
    after``. The mean has the same bits on every rank.

    Creating one and `reduce` are collective over ``comm``; `close`, and the end of a ``with`` block, waits for nobody.

    Parameters
    ----------
    compressor : Compressor, str, mapping or None
        An object, a name or a configuration (see `mpicomp.get_compressor`). None lets the policy choose.
    collective : str
        A name from `mpicomp.list_collectives`; one that is built upon another may name it behind a colon, as in
        ``"star-topk:ring"``. ``"auto"`` lets the policy choose; ``"static"`` takes at every step and for every bucket
        the one of least predicted time of those that deliver all that was selected, exchanges without compression among
        them; see ``cost``.
    policy : Policy, str, mapping or None
        An object, which serves this reducer alone, a name or a configuration (see `mpicomp.get_policy`): what chooses
        ratios, collectives and dense exchange. None is ``"static"`` where a compressor is named, and ``"auto"`` where
        none is: see docs/policies.md.
    feedback : bool or None
        Whether what a step does not send is kept for the next one. None does what the compressor declares.
    nonfinite : {"raise", "skip", "pass"}
        What happens on all ranks when a gradient holds NaN or infinity on some rank. ``"raise"`` raises
        `NonFiniteError`; ``"skip"`` delivers zeros; both leave the residuals as they were. ``"pass"``
        delivers what comes out and keeps it out of the residuals.
    comm : mpi4py.MPI.Comm, Transport or None
        A communicator is duplicated. None stands for MPI.COMM_WORLD.
    bucket_bytes : int or None
        Arrays are exchanged in flat buckets of about this size, in the order in which they are first passed. None lets
        the joint choice cut them by what it predicts of the network, for exchanges that begin before all arrays are
        there; other policies take 32 MiB. Policies that work with one bucket for everything, or with one for each
        array, make those whatever is named.
    seed : int
        For schemes that draw random numbers; the same on all ranks.
    threads : int
        Number of threads of this rank that share a sweep over a large array.
    cost : CostModel, str or None
        What is known of links, operations and kernels, or the file that ``mpicomp bench collectives --calibrate`` wrote
        it to; that of rank 0 counts. A copy of it learns from every step, see `cost`. With None, ``collective="auto"``
        measures for about a second before the first step, once a process for each layout of ranks
        (``MPICOMP_PROBE=0``: not at all), and a collective that was named is taken without predicting anything.
    warmup : int, str or None
        The first so many steps are dense, then the policy begins; ``"ramp:N"`` sends at falling ratios in them, from
        0.25 to the compressor's, as DGC does. None is 20 where a compressor is named and nothing else (no collective,
        policy or feedback), so that what comes late cannot harm the beginning, and 0 otherwise. It is 0 for compressors
        that have a warm-up of their own, for those that deliver something else than a mean, and for ``dcttopk``, whose
        residual is momentum. Steps that were undone do not count.
    feedback_decay : float
        Above 0 and at most 1: a residual is multiplied by it when it is added to the next gradient, which forgets what
        is never sent. Then ``gradient + feedback_decay * residual before`` is what comes to the mean and the residual
        after.
    normalises : bool
        Whether an optimizer divides the mean by the root of its mean square, as Adam does. What comes late then comes
        in bursts that make its steps smaller, which ``auto``, and the warning of a compressor that falls behind, take
        into account.
    local_steps : sequence of int
        Steps that ranks may make by themselves from one call of `reduce` to the next, ascending, where they exchange
        what these have changed. With more than one ``policy="auto"`` chooses; see `local_steps`.
    on_failure : {"abort", "shrink"}
        With ``"shrink"`` the ranks that are left go on where one dies in `reduce`: from that very step on the mean is
        theirs. A step is applied on all of them or on none, for which they agree in each, and they go on as if they
        were restarted from what they hold; what the residual of the dead rank held is lost. The record says who it was.
        It needs Open MPI, started with ``--with-ft ulfm``. ``"abort"`` lets the job end with the rank.
    on_shrink : callable, optional
        Called on each rank that is left, before the step is made again, with the list of those that died, by their
        numbers in the whole job, and the number of those that are left: a script may share out their data.

    Raises
    ------
    ConfigurationError
        For a setting that cannot be, on all ranks where it cannot be on one; `UnknownNameError` and
        `IncompatiblePairError` are kinds of it.

    Examples
    --------
    One process is a world of one rank:

    >>> import numpy as np
    >>> from mpicomp import Reducer, TopK
    >>> from mpicomp.transport import LocalWorld
    >>> reducer = Reducer(TopK(ratio=0.25), warmup=0, comm=LocalWorld(1).transports[0])
    >>> mean = reducer.reduce({"weight": np.array([[1, -4], [2, 3]], np.float32)})
    >>> mean["weight"].tolist()
    [[0.0, -4.0], [0.0, 0.0]]
    >>> reducer.residual("weight").tolist()
    [[1.0, 0.0], [2.0, 3.0]]
    """

    @_with_known_settings
    def __init__(
        self,
        compressor: Compressor | str | Mapping[str, Any] | None = None,
        collective: str = "auto",
        policy: Policy | str | Mapping[str, Any] | None = None,
        feedback: bool | None = None,
        nonfinite: str = "raise",
        comm: Any = None,
        *,
        bucket_bytes: int | None = LARGE_BUCKET,
        seed: int = 0,
        threads: int = 1,
        cost: CostModel | str | None = None,
        warmup: int | str | None = None,
        feedback_decay: float = 1.0,
        normalises: bool = True,
        local_steps: Sequence[int] = (1,),
        on_failure: str = "abort",
        on_shrink: Callable[[list[int], int], None] | None = None,
    ) -> None:
        self._closed = False
        self._owned = not isinstance(comm, Transport)
        transport = connect(comm)

        def make(again: Policy | None = None) -> tuple[Core, Policy]:
            plugins.load_all()
            if on_failure not in _ON_FAILURE:
                raise UnknownNameError("on_failure", str(on_failure), _ON_FAILURE)
            survives = on_failure == "shrink"
            if survives:
                transport.check_survives("reducer")
            if nonfinite not in _NONFINITE:
                raise UnknownNameError("nonfinite", nonfinite, _NONFINITE)
            if feedback not in (None, True, False):
                raise ConfigurationError(f"reducer: feedback must be None, True or False, got {feedback!r}")
            chosen = again or get_policy(policy or ("auto" if compressor is None else "static"))
            if chosen.serves:
                raise ConfigurationError(
                    f"reducer: this policy ({chosen.id}) serves another reducer; make a second object, or pass its "
                    "name or configuration"
                )
            own = None if compressor is None else get_compressor(compressor)
            if len(local_steps) > 1 and chosen.id != "auto":
                raise ConfigurationError(
                    f"reducer: how many steps ranks make between exchanges is chosen by policy='auto', got policy="
                    f"'{chosen.id}'; name one number of steps"
                )
            named = UserSettings(own, collective, feedback, cost, normalises, local_steps)
            before = choose_warmup(warmup, named.compressor, collective, policy, feedback)
            runs = WarmUp(chosen, before) if before else chosen
            runs.configure(named)
            settings: dict[str, Any] = {
                "compressor": chosen.compressor.get_config(),
                "collective": collective,
                "policy": chosen.get_config(),
                "feedback": chosen.feedback,
                "warmup": before,
                "nonfinite": nonfinite,
                "bucket_bytes": runs.bucket_bytes
                or (None if bucket_bytes is None else _whole("bucket_bytes", bucket_bytes, 1)),
                "seed": _whole("seed", seed),
                "normalises": bool(normalises),
                "local_steps": list(local_steps),
            }
            decay = settings["feedback_decay"] = _decay(feedback_decay)
            if decay != 1 and not chosen.feedback:
                raise ConfigurationError(
                    f"reducer: feedback_decay={decay} has no residual to act on, since {chosen.compressor.id} runs "
                    "without error feedback; leave it out, or pass feedback=True"
                )
            entry = chosen.compressor.entry
            layout = Layout(chosen.feedback, settings["bucket_bytes"], entry, _whole("threads", threads, 1), decay)
            telemetry = Telemetry(transport.group.size)
            # Where ranks take turns in one process, no rank's seconds are its own.
            pace = Pace(transport.group.size if transport.probes else 1)
            core = Core(settings, nonfinite, settings["seed"], entry, layout, runs, transport, telemetry, pace)
            core.survives = survives
            return core, chosen

        self._make = make
        self._on_shrink = on_shrink
        self._generation = transport.generation
        self._past: list[Core] = []  # whose arrays MPI may still know, of ranks that have died
        try:
            self._core, self._policy = together(make, transport, "reducer")
        except BaseException:
            if self._owned:
                transport.close()
            raise
        self._policy.serves = True
        self._user = transport.enter()

    @property
    def compressor(self) -> Compressor:
        """The one that was named; where none was, the one whose settings the policy chooses."""
        return self._core.policy.compressor

    @property
    def policy(self) -> Policy:
        """The policy, which chooses plans after the warm-up."""
        return self._policy

    @property
    def feedback(self) -> bool:
        """Whether error feedback is on."""
        return self._core.policy.feedback

    @property
    def cost(self) -> CostModel | None:
        """The cost model of links, operations and kernels; None before the first step or where nothing is predicted."""
        return self._core.policy.cost

    @property
    def local_steps(self) -> int:
        """Steps that ranks are to make by themselves until they call `reduce` again; the same on all ranks."""
        return self._core.policy.local_steps

    @property
    def transport(self) -> Transport:
        """The transport, which runs the rounds."""
        return self._core.transport

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the last call of `reduce` on this rank; None before the first."""
        return self._core.last_step

    def reduce(
        self,
        gradients: Mapping[str, Any],
        lr: float | None = None,
        *,
        absent: Collection[str] = (),
        scale: float = 1.0,
        finite: bool = True,
        beside: Beside | None = None,
    ) -> dict[str, Any]:
        """Average gradients over the ranks.

        Collective: all ranks call it with the same names, shapes and dtypes, in the same order at the first call.
        Names that were never passed before, or that are missing, are compared among ranks and then accepted.

        Parameters
        ----------
        gradients : mapping of str to array
            NumPy, CuPy or torch arrays of float16, bfloat16, float32 or float64, of any shape and strides. They are not
            modified. 16-bit ones are summed, and their residuals kept, in float32.
        lr : float, optional
            The learning rate of this step, for the record and for policies.
        absent : collection of str
            Names for which this rank has no gradient; their arrays are zeros. Ranks may differ in it.
        scale : float
            Factor that gradients are multiplied by first, the same on all ranks: means and residuals are those of the
            scaled gradients.
        finite : bool
            False where something else that belongs to this step is known not to be finite, on all ranks: it is then
            treated as if a gradient were not.
        beside : Beside, optional
            Exchanges that belong to this step but to no bucket; see `mpicomp.reducer.beside`.

        Returns
        -------
        dict of str to array
            The means: of the kind, dtype and shape of the gradients, valid until the next call. NumPy arrays are
            read-only; torch and CuPy know no such thing, and theirs are not to be written to either. Names that
            are absent on all ranks are left out, unless something is delivered that was kept back earlier.

        Raises
        ------
        ArrayTypeError
            For arrays that cannot be reduced, on all ranks before anything is delivered.
        DisagreementError
            Where ranks were given different things, on all ranks before anything is delivered.
        NonFiniteError
            With ``nonfinite="raise"``, on all ranks; residuals are as they were.
        ClosedError
            After `close`.
        """
        rounds = self.rounds(gradients, lr, absent=absent, scale=scale, finite=finite, beside=beside)
        means: dict[str, Any] = self._core.transport.run(rounds)
        return means

    def rounds(
        self,
        gradients: Mapping[str, Any],
        lr: float | None = None,
        *,
        absent: Collection[str] = (),
        scale: float = 1.0,
        finite: bool = True,
        beside: Beside | None = None,
    ) -> Rounds[Any]:
        """Do what `reduce` does as a generator of rounds, for ranks that live in one process.

        See `mpicomp.transport.LocalWorld`.
        """
        self._check_open()
        transport = self._core.transport
        before, transport.user = transport.user, self._user
        failed = self._core.failed
        if failed is None and self._generation != transport.generation:
            failed = RankFailedError("a rank has died")
        try:
            while True:
                try:
                    if failed is not None:
                        yield from self._survive(failed)
                    return (yield from self._step(gradients, lr, absent, scale, finite, beside))
                except RankFailedError as error:
                    if not self._core.survives:
                        raise
                    failed = error
        finally:
            transport.user = before

    def _step(
        self,
        gradients: Mapping[str, Any],
        lr: float | None,
        absent: Collection[str],
        scale: float,
        finite: bool,
        beside: Beside | None,
    ) -> Rounds[Any]:
        begin = time.perf_counter()
        step = Step(self._core, scale, beside)
        try:
            step.examine(gradients, absent, lr)
            if self._core.layout.buckets:
                ready = self._core.transport.clock()
                yield from step.refresh()
                for bucket in self._core.layout.buckets:
                    yield from step.exchange(bucket, step.of(bucket), ready)
            return (yield from step.conclude(finite))
        except RankFailedError:
            step.forget()
            raise
        finally:
            step.note_seconds(begin)

    @property
    def survives(self) -> bool:
        """Whether those that are left go on where a rank dies."""
        return self._core.survives

    def _survive(self, error: RankFailedError) -> Rounds[Any]:
        """Go on with the ranks that are left, in the state before the step. As rounds."""
        before, transport = self._core, self._core.transport
        lost = list(before.lost)
        if self._generation == transport.generation:
            lost += leave_the_dead(transport, str(error) == AGREED)
        self._generation = transport.generation
        before.lost = lost  # should another one die before this has come to its end
        before.failed = None
        state = yield from common_state(self.state_dict(), transport.group)
        policy = get_policy(self._policy.get_config())
        self._core, self._policy = self._make(policy)
        self._policy.serves = True
        self._core.last_step, self._core.lost = before.last_step, lost
        self.load_state_dict(state)
        self._past.append(before)
        if self._on_shrink is not None and lost:
            self._on_shrink(list(lost), transport.group.size)

    def counted(self, exchange: Rounds[Value]) -> Rounds[Value]:
        """Pass on rounds of the caller's own; their bytes are overhead of the step that comes next."""
        return self._core.outside.count(exchange, self._core.transport.group)

    def stream(self, thread: ProgressThread, scale: float = 1.0, beside: Beside | None = None) -> Stream | None:
        """Begin a step whose arrays are handed over one by one, and exchanged by a thread meanwhile.

        Collective, as rounds are: between this and `Stream.finish` nothing else of this reducer may be called.

        Parameters
        ----------
        thread : ProgressThread
            On this reducer's transport, with one channel. It keeps its rounds apart from those of `reduce`.
        scale, beside
            See `reduce`.

        Returns
        -------
        Stream or None
            None where all arrays have to be there first, the same on all ranks: at the first step, and where gradients
            are clipped by the norm of all of them.
        """
        self._check_open()
        if not self._core.layout.buckets or self._core.entry.clip is not None:
            return None
        return Stream(self._core, thread, scale, beside)

    def residual(self, name: str) -> NDArray[np.floating]:
        """Return a copy of the residual of an array, shaped like it.

        Zeros without feedback. 16-bit arrays have float32 residuals.

        Raises
        ------
        UnknownNameError
            Where no such array was reduced.
        """
        return self._core.layout.residual(name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that has to survive a restart, on this rank.

        Returns
        -------
        dict
            ``schema``, ``step``, ``settings``; ``residuals`` and ``velocities`` (of momentum correction): dicts of name
            to array, copied; ``memories``: what compressors have learnt, by the first name of each bucket; ``policy``:
            what the policy has; ``cost``: the cost model, or None.
        """
        core = self._core
        now = core.loaded or Loaded(core.count, core.policy.state_dict(), core.policy.cost)
        return {
            "schema": _SCHEMA,
            "step": now.step,
            "settings": dict(core.settings),
            "policy": dict(now.policy),
            "cost": None if now.cost is None else now.cost.to_json(),
        } | core.layout.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Each rank loads its own; not collective.

        At the next step the ranks compare what they have loaded: the step, and what the policy has learnt, have to be
        the same on all of them, and all of them have to load. A cost model of another number of hosts is left out.

        Raises
        ------
        ConfigurationError
            Where the state is none of a reducer's, or a residual's shape is not its array's. Nothing is loaded then.
        """
        if not isinstance(state, Mapping) or state.get("schema") != _SCHEMA or "residuals" not in state:
            raise ConfigurationError("reducer: the state is not one that Reducer.state_dict gave; nothing was loaded")
        step = _whole("the state's step", state.get("step"), 0)
        cost = None if state.get("cost") is None else CostModel.from_json(state["cost"])
        self._core.layout.load(state)
        self._core.loaded = Loaded(step, state.get("policy", {}), cost)

    def load_residuals(self, state: Mapping[str, Any]) -> None:
        """Load residuals, velocities and memories of compressors of a state, and nothing else of it.

        For a script that undoes steps: each rank loads its own, between the same two steps on all ranks. Not
        collective.

        Parameters
        ----------
        state : mapping
            What `state_dict` returned.

        Raises
        ------
        ConfigurationError
            Where a residual's shape is not its array's. Nothing is loaded then.
        """
        self._core.layout.load(state)

    def close(self) -> None:
        """Release its MPI resources. It waits for no other rank, and a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._core.staging.close()
            self._core.transport.retire(self._user)
            if self._owned:
                self._core.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("reducer: it was closed; make a new one")


def check_settings(settings: Mapping[str, Any], compressor: Any, subsystem: str) -> None:
    """Refuse keywords that are no settings of a reducer, and say where those of a compressor belong.

    Parameters
    ----------
    settings : mapping
        Keywords.
    compressor : Compressor, str, mapping or None
        As `Reducer` takes it.
    subsystem : str
        Start of the error message.
    """
    known = inspect.signature(Reducer).parameters
    unknown = {name: value for name, value in settings.items() if name not in known}
    if not unknown:
        return
    compressor = "topk" if compressor is None else compressor  # as an example
    config = get_compressor(compressor).get_config()
    inner = {name: value for name, value in unknown.items() if name in config and name != "id"}
    if not inner:
        raise UnknownNameError(f"{subsystem}: settings", next(iter(unknown)), known)
    meant = get_compressor(config | inner)
    module = "mpicomp." if type(meant).__module__.startswith("mpicomp.") else ""
    raise ConfigurationError(
        f"{subsystem}: {', '.join(inner)} must be set in the compressor; pass compressor={module}{meant!r}, or its "
        f"configuration, { ({'id': config['id']} | inner)!r}"
    )


def _whole(name: str, value: Any, least: int | None = None) -> int:
    """Return a setting that has to be a whole number, of whatever integer type it came in."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigurationError(f"reducer: {name} must be a whole number, got {value!r}") from None
    if least is not None and number < least:
        raise ConfigurationError(f"reducer: {name} must be at least {least}, got {value!r}")
    return number


def _decay(value: Any) -> float:
    """Return the factor of residuals."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigurationError(f"reducer: feedback_decay must be above 0 and at most 1, got {value!r}")
    return float(value)
