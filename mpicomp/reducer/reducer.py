"""The reducer: gradients in, their mean over ranks out, and nothing lost in between."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp import plugins
from mpicomp.compressors import Compressor, get_compressor
from mpicomp.cost import CostModel
from mpicomp.errors import AgreedRankFailure, ClosedError, ConfigurationError, RankFailedError, UnknownNameError
from mpicomp.policies import Plan, Policy, UserSettings, get_policy
from mpicomp.policies.warmup import WarmUp, choose_warmup
from mpicomp.reducer.agreement import NO_EXTRA, ExtraExchange, LoadedState, run_collectively
from mpicomp.reducer.layout import LARGE_BUCKET, Layout
from mpicomp.reducer.record import StepRecord, Tally, Value
from mpicomp.reducer.settings import to_decay, with_known_settings
from mpicomp.reducer.step import Step
from mpicomp.reducer.stream import Stream
from mpicomp.reducer.telemetry import Telemetry
from mpicomp.rounds import Rounds
from mpicomp.rounds.reports import from_one
from mpicomp.setting_checks import to_whole
from mpicomp.transport import Transport
from mpicomp.transport.connect import connect
from mpicomp.transport.scheduler import ProgressThread

_NONFINITE = ("raise", "skip", "pass")
_ON_FAILURE = ("abort", "shrink")
_SCHEMA = 1
_numbers = itertools.count()


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
        A name from `mpicomp.list_collectives`; one that is built on another may name it after a colon, as in
        ``"star-topk:ring"``. ``"auto"`` lets the policy choose; ``"static"`` takes at every step and for every bucket
        the one of least predicted time of those that deliver all that was selected, exchanges without compression among
        them; see ``policy``.
    policy : Policy, str, mapping or None
        An object, which serves this reducer alone, a name or a configuration (see `mpicomp.get_policy`): what chooses
        ratios, collectives and dense exchange. None is ``"static"`` where a compressor is named, and ``"auto"`` where
        none is, and so is a configuration without ``"id"``: see docs/policies.md.

        ``"warmup"`` in a configuration, whatever the policy: the first so many steps are dense, then the policy begins;
        ``"ramp:N"`` sends at falling ratios in them, from 0.25 to the compressor's, as DGC does. The default is 20
        where a compressor is named and nothing else (no collective, policy or feedback), so that what comes late cannot
        harm the beginning, and 0 otherwise. It is 0 for compressors that have a warm-up of their own, for those that
        deliver something else than a mean, and for ``dcttopk``, whose residual is momentum. Steps that were undone do
        not count.

        ``"cost"`` in a configuration: a `CostModel`, or the file that ``mpicomp bench collectives --calibrate`` wrote
        it to; that of rank 0 counts. A copy of it learns from every step, see `cost`. Without it ``collective="auto"``
        measures for about a second before the first step, once a process for each layout of ranks
        (``MPICOMP_PROBE=0``: not at all), and a named collective runs without predictions.
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
    feedback_decay : float
        Above 0 and at most 1: a residual is multiplied by it when it is added to the next gradient, which forgets what
        is never sent. Then ``gradient + feedback_decay * residual before`` is what comes to the mean and the residual
        after.
    on_failure : {"abort", "shrink"} or callable
        With ``"shrink"`` the ranks that are left go on where one dies in `reduce`: from that very step on the mean is
        theirs. A step is applied on all of them or on none, for which they agree in each, and they go on as if they
        were restarted from what they hold; what the residual of the dead rank held is lost. The record says who it was.
        It needs Open MPI, started with ``--with-ft ulfm``. A callable does so, too: before the step is made again it is
        called on each rank that is left, with the list of those that died, by their numbers in the whole job, and the
        number of those that are left, so that a script may share out its data. ``"abort"`` lets the job end with the
        rank.

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
    >>> reducer = Reducer(TopK(ratio=0.25), policy={"warmup": 0}, comm=LocalWorld(1).transports[0])
    >>> mean = reducer.reduce({"weight": np.array([[1, -4], [2, 3]], np.float32)})
    >>> mean["weight"].tolist()
    [[0.0, -4.0], [0.0, 0.0]]
    >>> reducer.residual("weight").tolist()
    [[1.0, 0.0], [2.0, 3.0]]
    """

    _normalises = True  # see `mpicomp.reducer.special_reducers.TrainingReducer`
    _local_steps: Sequence[int] = (1,)

    @with_known_settings
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
        feedback_decay: float = 1.0,
        on_failure: str | Callable[[list[int], int], None] = "abort",
    ) -> None:
        self._closed = False
        self._owned = not isinstance(comm, Transport)
        self._compressor, self._collective, self._feedback = compressor, collective, feedback
        self.nonfinite, self._bucket_bytes, self._seed, self._threads = nonfinite, bucket_bytes, seed, threads
        self._decay, self._on_failure = feedback_decay, on_failure
        self.transport = connect(comm)
        self._generation = self.transport.generation
        self._past: list[Layout] = []  # whose arrays MPI may still know, of ranks that have died
        self.number = next(_numbers)
        """Tells reducers of this process apart."""
        self.last_step: StepRecord | None = None
        """The record of the last call of `reduce` on this rank; None before the first."""
        self.lost_ranks: list[int] = []
        """Ranks that have died since the last step, by their numbers in the whole job."""
        try:
            run_collectively(lambda: self._configure(policy), self.transport, "reducer")
        except BaseException:
            if self._owned:
                self.transport.close()
            raise
        self._claim_policy()
        self._user = self.transport.enter()

    def _configure(self, named: Policy | str | Mapping[str, Any] | None) -> None:
        """Check settings and make all parts of the reducer; communicates with nobody."""
        plugins.load_all()
        if not callable(self._on_failure) and self._on_failure not in _ON_FAILURE:
            raise UnknownNameError("on_failure", str(self._on_failure), _ON_FAILURE)
        self.survives = self._on_failure != "abort"
        """Whether those that are left go on where a rank dies: then all agree in each step that it is applied."""
        if self.survives:
            self.transport.check_survives("reducer")
        if self.nonfinite not in _NONFINITE:
            raise UnknownNameError("nonfinite", self.nonfinite, _NONFINITE)
        if self._feedback not in (None, True, False):
            raise ConfigurationError(f"reducer: feedback must be None, True or False, got {self._feedback!r}")
        default = "auto" if self._compressor is None else "static"
        policy = get_policy({"id": default} | dict(named) if isinstance(named, Mapping) else named or default)
        if policy.serves:
            raise ConfigurationError(
                f"reducer: this policy ({policy.id}) serves another reducer; make a second object, or pass its name or "
                "configuration"
            )
        compressor = None if self._compressor is None else get_compressor(self._compressor)
        if len(self._local_steps) > 1 and policy.id != "auto":
            raise ConfigurationError(
                f"reducer: how many steps ranks make between exchanges is chosen by policy='auto', got policy="
                f"'{policy.id}'; name one number of steps"
            )
        settings = UserSettings(
            compressor, self._collective, self._feedback, policy.known_cost, self._normalises, self._local_steps
        )
        chosen = None if isinstance(named, Mapping) and "id" not in named else named
        warmup = choose_warmup(policy.warmup, compressor, self._collective, chosen, self._feedback)
        planner = WarmUp(policy, warmup) if warmup else policy
        planner.configure(settings)
        self.seed = to_whole("reducer", "seed", self._seed)
        cut_bytes = None if self._bucket_bytes is None else to_whole("reducer", "bucket_bytes", self._bucket_bytes, 1)
        decay = to_decay(self._decay)
        if decay != 1 and not policy.feedback:
            raise ConfigurationError(
                f"reducer: feedback_decay={decay} has no residual to act on, since {policy.compressor.id} runs "
                "without error feedback; leave it out, or pass feedback=True"
            )
        self.policy = policy
        """The policy, which chooses plans after the warm-up."""
        self.planner = planner
        """What chooses plans now: the policy, or the warm-up before it."""
        self.settings: dict[str, Any] = {
            "compressor": policy.compressor.get_config(),
            "collective": self._collective,
            "policy": policy.get_config(),
            "feedback": policy.feedback,
            "warmup": warmup,
            "nonfinite": self.nonfinite,
            "bucket_bytes": planner.bucket_bytes or cut_bytes,
            "seed": self.seed,
            "normalises": bool(self._normalises),
            "local_steps": list(self._local_steps),
            "feedback_decay": decay,
        }
        """Settings that have to be the same on all ranks."""
        threads = to_whole("reducer", "threads", self._threads, 1)
        self.layout = Layout(policy.feedback, self.settings["bucket_bytes"], policy.compressor.entry, threads, decay)
        # Where ranks take turns in one process, the seconds of a rank are also those of others.
        self.telemetry = Telemetry(self.transport.group.size, self.transport.probes)
        self.count = 0
        """Steps so far."""
        self.plans: dict[int, Plan] = {}
        """By bucket, the plan that the last step has run."""
        self.outside_tally = Tally()
        """Bytes of rounds since the last step that belong to no step; the record of the next one includes them."""
        self.loaded: LoadedState | None = None
        """A loaded state that waits for the next step, or None."""
        self.must_check_ranks = False
        """Whether the last step has failed here in a way that the other ranks may not know of."""
        self.failed: RankFailedError | None = None
        """That a rank was found to have died, outside of `reduce` or when the last step was applied already."""
        self.stop = False
        """Whether all ranks know that some rank was asked to stop."""

    def _claim_policy(self) -> None:
        """Note in the policy that it serves this reducer: on all ranks or on none, so not before all have made it."""
        self.policy.warmup, self.policy.serves = self.settings["warmup"], True

    @property
    def compressor(self) -> Compressor:
        """The one that was named; where none was, the one whose settings the policy chooses."""
        return self.planner.compressor

    @property
    def feedback(self) -> bool:
        """Whether error feedback is on."""
        return self.planner.feedback

    @property
    def cost(self) -> CostModel | None:
        """The cost model of links, operations and kernels; None before the first step or where nothing is predicted."""
        return self.planner.cost

    @property
    def local_steps(self) -> int:
        """Steps that ranks are to make by themselves until they call `reduce` again; the same on all ranks."""
        return self.planner.local_steps

    def reduce(
        self,
        gradients: Mapping[str, Any],
        lr: float | None = None,
        *,
        absent: Collection[str] = (),
        scale: float = 1.0,
        finite: bool = True,
        extra: ExtraExchange = NO_EXTRA,
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
        extra : ExtraExchange
            Exchanges that belong to this step but to no bucket; see `mpicomp.reducer.agreement.ExtraExchange`.

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
        rounds = self.rounds(gradients, lr, absent=absent, scale=scale, finite=finite, extra=extra)
        means: dict[str, Any] = self.transport.run(rounds)
        return means

    def rounds(
        self,
        gradients: Mapping[str, Any],
        lr: float | None = None,
        *,
        absent: Collection[str] = (),
        scale: float = 1.0,
        finite: bool = True,
        extra: ExtraExchange = NO_EXTRA,
    ) -> Rounds[Any]:
        """Do what `reduce` does as a generator of rounds, for ranks that live in one process.

        See `mpicomp.transport.LocalWorld`.
        """
        if self._closed:
            raise self._closed_error()
        transport = self.transport
        user, transport.user = transport.user, self._user
        failed = self.failed
        if failed is None and self._generation != transport.generation:
            failed = RankFailedError("a rank has died")
        try:
            while True:
                if failed is not None:
                    try:
                        yield from self._continue_without_dead(failed)
                    except RankFailedError as error:
                        failed = error
                        continue
                begin = transport.timer()
                step = Step(self, scale, extra)
                try:
                    step.check_gradients(gradients, absent, lr)
                    buckets = self.layout.buckets
                    if buckets:
                        yield from step.begin()
                        for bucket in buckets:
                            yield from step.exchange(bucket, step.gradients_of(bucket), begin)
                    return (yield from step.commit(finite))
                except RankFailedError as error:
                    step.undo()
                    if not self.survives:
                        raise
                    failed = error
                finally:
                    step.finish(begin)
        finally:
            transport.user = user

    def _continue_without_dead(self, error: RankFailedError) -> Rounds[None]:
        """Go on with the ranks that are left, in the state before the step. As rounds.

        All rounds on the transport end, so that nobody waits for this rank any more; the ranks that are left agree who
        they are, and become a smaller group. They go on from one state: a report of a step may have reached some ranks
        and others not, and plans have to follow from the same, so that the first rank's policy counts.
        """
        transport = self.transport
        if self._generation == transport.generation:
            transport.revoke()
            if not isinstance(error, AgreedRankFailure):
                transport.agree(False)
            self.lost_ranks = self.lost_ranks + transport.shrink()
        self._generation = transport.generation
        self.failed = None
        state = self.state_dict()
        shared = {name: state[name] for name in ("step", "policy", "cost")}
        state |= yield from from_one(shared, transport.group, "reducer")
        self._past.append(self.layout)
        self._configure(self.policy.get_config() | {"warmup": self.policy.warmup, "cost": self.policy.known_cost})
        self._claim_policy()
        self.load_state_dict(state)
        if callable(self._on_failure) and self.lost_ranks:
            self._on_failure(list(self.lost_ranks), transport.group.size)

    def counting_bytes(self, exchange: Rounds[Value]) -> Rounds[Value]:
        """Pass on rounds of the caller's; their bytes are overhead of the step that comes next."""
        return self.outside_tally.count(exchange, self.transport.group)

    def stream(self, thread: ProgressThread, scale: float = 1.0, extra: ExtraExchange = NO_EXTRA) -> Stream | None:
        """Begin a step whose arrays are handed over one by one, and exchanged by a thread meanwhile.

        Collective, as rounds are: between this and `Stream.finish` nothing else of this reducer may be called.

        Parameters
        ----------
        thread : ProgressThread
            On this reducer's transport, with one channel. It keeps its rounds apart from those of `reduce`.
        scale, extra
            See `reduce`.

        Returns
        -------
        Stream or None
            None where all arrays have to be there first, the same on all ranks: at the first step, and where gradients
            are clipped by the norm of all of them.
        """
        if self._closed:
            raise self._closed_error()
        if not self.layout.buckets or self.layout.entry.clip is not None:
            return None
        return Stream(self, thread, scale, extra)

    def residual(self, name: str) -> NDArray[np.floating]:
        """Return a copy of the residual of an array, shaped like it.

        Zeros without feedback. 16-bit arrays have float32 residuals.

        Raises
        ------
        UnknownNameError
            Where no such array was reduced.
        """
        return self.layout.residual(name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that has to survive a restart, on this rank.

        Returns
        -------
        dict
            ``schema``, ``step``, ``settings``; ``residuals`` and ``velocities`` (of momentum correction): dicts of name
            to array, copied; ``memories``: what compressors have learnt, by the first name of each bucket; ``policy``:
            what the policy has; ``cost``: the cost model, or None.
        """
        now = self.loaded or LoadedState(self.count, self.planner.state_dict(), self.planner.cost)
        return {
            "schema": _SCHEMA,
            "step": now.step,
            "settings": dict(self.settings),
            "policy": dict(now.policy),
            "cost": None if now.cost is None else now.cost.to_json(),
        } | self.layout.state()

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
        step = to_whole("reducer", "the state's step", state.get("step"), 0)
        cost = None if state.get("cost") is None else CostModel.from_json(state["cost"])
        self.layout.load(state)
        self.loaded = LoadedState(step, state.get("policy", {}), cost)

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
        self.layout.load(state)

    def close(self) -> None:
        """Release its MPI resources. It waits for no other rank, and a second call does nothing."""
        if not self._closed:
            self._closed = True
            self.layout.close()
            self.transport.retire(self._user)
            if self._owned:
                self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _closed_error(self) -> ClosedError:
        return ClosedError("reducer: it was closed; make a new one")
