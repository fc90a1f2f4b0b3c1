"""The reducer: gradients in, their mean over ranks out, and nothing lost in between."""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mpicomp import plugins
from mpicomp.arrays import is_finite
from mpicomp.compressors import Compressor, get_compressor
from mpicomp.cost import CostModel
from mpicomp.errors import (
    AgreedRankFailure,
    ClosedError,
    ConfigurationError,
    MessageError,
    MpicompError,
    RankFailedError,
    UnknownNameError,
)
from mpicomp.gpu import on_device
from mpicomp.gpu.routes import choose_routes
from mpicomp.job import stop
from mpicomp.kernels.cpu.compile import check_compiler
from mpicomp.mpi import Transport
from mpicomp.mpi.connect import connect
from mpicomp.mpi.rounds import Rounds, from_one, gather_rows
from mpicomp.mpi.thread import ProgressThread
from mpicomp.mpi.transport import RoundLog
from mpicomp.policies import BucketOutcome, Plan, Policy, StepReport, UserSettings
from mpicomp.reducer import trace
from mpicomp.reducer.agreement import (
    NO_CHECKS,
    Checks,
    LoadedState,
    Signature,
    agree,
    no_memory,
    run_collectively,
    settings_of_state,
)
from mpicomp.reducer.layout import LARGE_BUCKET, Layout
from mpicomp.reducer.record import StepRecord, nonfinite_error
from mpicomp.reducer.settings import check_arguments, make_planner, to_decay
from mpicomp.reducer.step import Step
from mpicomp.reducer.stream import Stream
from mpicomp.reducer.telemetry import PACE_STEPS, Telemetry
from mpicomp.setting_checks import to_number, to_whole

_NONFINITE = ("raise", "skip", "pass")
_ON_FAILURE = ("abort", "shrink")
_SCHEMA = 1
_numbers = itertools.count()


@dataclass
class Deaths:
    """Ranks that have died, as a reducer knows of them, and its reaction: see ``on_failure`` of `Reducer`."""

    reaction: str | Callable[[list[int], int], None]
    generation: int
    """Of the transport when this reducer last began with its ranks."""
    found: RankFailedError | None = None
    """A death found outside of `Reducer.reduce`, or after a step was applied."""
    lost_ranks: list[int] = field(default_factory=list)
    """Dead since the last step, by their numbers in the whole job."""
    layouts: list[Layout] = field(default_factory=list)
    """Of the ranks before a death: MPI may still know their arrays."""

    def __post_init__(self) -> None:
        self.survives = self.reaction != "abort"
        """Whether the other ranks continue after a death: then all agree in each step that it is applied."""


class Reducer:
    """Averages named gradients over ranks, compressed, with error feedback.

    To rounding, over all ranks: sum of ``gradient + residual before`` equals ``ranks x mean`` plus sum of ``residual
    after``. The mean has the same bits on every rank.

    Creating one and `reduce` are collective over ``comm``; `close`, and the end of a ``with`` block, wait for no rank.

    Parameters
    ----------
    compressor : Compressor, str, mapping or None
        An object, a name or a configuration (see `mpicomp.get_compressor`). None lets the policy choose.
    collective : str
        A name from `mpicomp.list_collectives`; one that is built on another may name it after a colon, as in
        ``"star-topk:ring"``. ``"auto"`` lets the policy choose. ``"static"`` takes for every bucket and step the
        collective of least predicted time among those that deliver all selected elements, dense exchange included.
    policy : Policy, str, mapping or None
        An object, which serves this reducer alone, a name or a configuration (see `mpicomp.get_policy`). It chooses
        ratios, collectives and dense exchange; see docs/policies.md. None, or a configuration without ``"id"``, is
        ``"static"`` with a compressor and ``"auto"`` without.

        ``"warmup"`` in a configuration of any policy: the number of dense steps before the policy begins; ``"ramp:N"``
        sends at falling ratios in N steps, from 0.25 to the compressor's, as DGC does. The default is 20 with a
        compressor and no other setting (collective, policy or feedback), so that late gradients cannot harm the
        beginning, and 0 otherwise. It is also 0 for compressors that have their own warm-up or deliver no mean.
        Steps that were undone do not count.

        ``"cost"`` in a configuration: a `CostModel`, or the file that ``mpicomp bench collectives --calibrate`` wrote;
        that of rank 0 counts. A copy of it learns from every step, see `cost`. Without it ``collective="auto"``
        measures for about a second before the first step, once a process for each layout of ranks
        (``MPICOMP_PROBE=0``: not at all), and a named collective runs without predictions.
    feedback : bool or None
        Whether the part of a gradient that is not sent is kept for the next step. None follows the compressor.
    nonfinite : {"raise", "skip", "pass"}
        Reaction of all ranks to a gradient with NaN or infinity on some rank. ``"raise"`` raises `NonFiniteError`;
        ``"skip"`` delivers zeros; neither changes residuals. ``"pass"`` delivers the result and keeps it
        out of the residuals.
    comm : mpi4py.MPI.Comm, Transport or None
        A communicator is duplicated. None stands for MPI.COMM_WORLD.
    bucket_bytes : int or None
        Arrays are exchanged in flat buckets of about this size, in the order in which they are first passed. None lets
        the joint choice cut them by its predictions of the network, for exchanges that begin before all arrays are
        there; other policies take 32 MiB. Policies that need one bucket for all arrays, or one for each, ignore it.
    seed : int
        For schemes that draw random numbers; the same on all ranks.
    threads : int
        Number of threads of this rank that share a sweep over a large array.
    feedback_decay : float
        Factor in (0, 1] of the residual that a step leaves for the next one: elements that are never sent fade.
    on_failure : {"abort", "shrink"} or callable
        With ``"shrink"`` the other ranks continue if a rank dies in `reduce`: from that step on the mean is theirs. In
        each step the ranks agree whether all of them apply it. They continue as if they were restarted from their
        state; the residual of the dead rank is lost, and the record names it. It needs Open MPI, started with
        ``--with-ft ulfm``. A callable does the same, and is called on each remaining rank before the step is repeated,
        with the list of the dead ranks, by their numbers in the whole job, and the number of remaining ranks, so that a
        script may share out its data. With ``"abort"`` the job ends.

    Raises
    ------
    ConfigurationError
        For a wrong setting, on all ranks if it is wrong on one; `UnknownNameError` and `IncompatiblePairError` are
        kinds of it.

    Examples
    --------
    One process is a world of one rank:

    >>> import numpy as np
    >>> from mpicomp import Reducer, TopK
    >>> from mpicomp.mpi import LocalWorld
    >>> reducer = Reducer(TopK(ratio=0.25), policy={"warmup": 0}, comm=LocalWorld(1).transports[0])
    >>> mean = reducer.reduce({"weight": np.array([[1, -4], [2, 3]], np.float32)})
    >>> mean["weight"].tolist()
    [[0.0, -4.0], [0.0, 0.0]]
    >>> reducer.residual("weight").tolist()
    [[1.0, 0.0], [2.0, 3.0]]
    """

    _normalises = True  # see `mpicomp.reducer.training_reducer.TrainingReducer`
    _default_policy: str | None = None

    @check_arguments("reducer")
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
        self._arguments: dict[str, Any] = {
            "compressor": compressor, "collective": collective, "feedback": feedback, "nonfinite": nonfinite,
            "bucket_bytes": bucket_bytes, "seed": seed, "threads": threads, "feedback_decay": feedback_decay,
        }  # fmt: skip
        self.transport = connect(comm)
        self.deaths = Deaths(on_failure, self.transport.generation)
        self.number = next(_numbers)  # among the reducers of this process
        self.last_step: StepRecord | None = None
        """The record of the last call of `reduce` on this rank; None before the first."""
        try:
            run_collectively(lambda: self._configure(policy), self.transport, "reducer")
        except BaseException:
            if self._owned:
                self.transport.close()
            raise
        # On all ranks or on none, so not before all have made it.
        self.policy.warmup, self.policy.serves = self.settings["warmup"], True
        self._user = self.transport.enter()
        self.transport.log = []

    def _configure(self, named: Policy | str | Mapping[str, Any] | None) -> None:
        plugins.load_all()
        check_compiler()
        given, reaction = self._arguments, self.deaths.reaction
        if not callable(reaction) and reaction not in _ON_FAILURE:
            raise UnknownNameError("on_failure", str(reaction), _ON_FAILURE)
        if self.deaths.survives:
            self.transport.check_survives("reducer")
        if given["nonfinite"] not in _NONFINITE:
            raise UnknownNameError("nonfinite", given["nonfinite"], _NONFINITE)
        compressor = None if given["compressor"] is None else get_compressor(given["compressor"])
        user_settings = UserSettings(compressor, given["collective"], given["feedback"], None, self._normalises)
        policy, planner, warmup = make_planner(named, user_settings, self._default_policy)
        cut_bytes = given["bucket_bytes"]
        if cut_bytes is not None:
            cut_bytes = to_whole("reducer", "bucket_bytes", cut_bytes, 1)
        decay = to_decay(given["feedback_decay"])
        if decay != 1 and not policy.feedback:
            raise ConfigurationError(
                f"reducer: feedback_decay={decay} has no residual to act on, since {policy.compressor.id} runs "
                "without error feedback; leave it out, or pass feedback=True"
            )
        self.policy = policy
        """The policy, which chooses plans after the warm-up."""
        self.planner = planner
        """The policy that chooses plans now: `policy`, or the warm-up before it."""
        self.learns_at_end = type(planner).on_step_end is not Policy.on_step_end
        self.settings: dict[str, Any] = {
            "compressor": policy.compressor.get_config(),
            "collective": given["collective"],
            "policy": policy.get_config(),
            "feedback": policy.feedback,
            "warmup": warmup,
            "nonfinite": given["nonfinite"],
            "bucket_bytes": planner.bucket_bytes or cut_bytes,
            "seed": to_whole("reducer", "seed", given["seed"]),
            "normalises": bool(self._normalises),
            "feedback_decay": decay,
        }
        """Settings that have to be the same on all ranks."""
        threads = to_whole("reducer", "threads", given["threads"], 1)
        self.layout = Layout(policy.feedback, self.settings["bucket_bytes"], policy.compressor.entry, threads, decay)
        # Where ranks take turns in one process, the seconds of a rank are also those of others.
        self.telemetry = Telemetry(self.transport.group, self.transport.probes)
        self.count = 0  # steps so far
        self.plans: Sequence[Plan] = ()  # of the last step, by bucket
        self.loaded: LoadedState | None = None  # a loaded state that waits for the next step
        self.must_check_ranks = False  # whether the last step has failed here, unknown to the other ranks
        self.stop = False  # whether all ranks know that some rank was asked to stop

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

    def reduce(
        self,
        gradients: Mapping[str, Any],
        lr: float | None = None,
        *,
        absent: Collection[str] = (),
        scale: float = 1.0,
        checks: Checks = NO_CHECKS,
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
        checks : Checks
            Comparisons of ranks in this step besides gradients; see `mpicomp.reducer.agreement.Checks`.

        Returns
        -------
        dict of str to array
            The means: of the kind, dtype and shape of the gradients, valid until the next call, and read-only. Names
            that are absent on all ranks are left out, unless a residual of theirs is sent.

        Raises
        ------
        ArrayTypeError, DisagreementError
            For arrays that cannot be reduced, or that differ between ranks: on all ranks before anything is delivered.
        NonFiniteError
            With ``nonfinite="raise"``, on all ranks; residuals are unchanged.
        ClosedError
            After `close`.
        """
        rounds = self.rounds(gradients, lr, absent=absent, scale=scale, checks=checks)
        means: dict[str, Any] = self.transport.run(rounds)
        return means

    def rounds(
        self,
        gradients: Mapping[str, Any],
        lr: float | None = None,
        *,
        absent: Collection[str] = (),
        scale: float = 1.0,
        checks: Checks = NO_CHECKS,
    ) -> Rounds[Any]:
        """Run `reduce` as a generator of rounds, for ranks of a `mpicomp.mpi.LocalWorld`."""
        if self._closed:
            raise self._closed_error()
        transport = self.transport
        user, transport.user = transport.user, self._user
        try:
            while True:
                begin = transport.timer()
                try:
                    if self.deaths.found is not None or self.deaths.generation != transport.generation:
                        yield from self._continue_without_dead(self.deaths.found)
                        checks.restart()
                    step = self.begin_step(scale, checks)
                    try:
                        given = self.pass_gradients(step, gradients, absent, lr)
                        if self.layout.buckets:
                            choosing = self.choose(step, step.log)
                            if choosing:
                                yield from choosing
                            for bucket in self.layout.buckets:
                                yield from step.exchange(bucket, given, begin, step.log)
                        return (yield from self.commit(step))
                    except RankFailedError:
                        step.undo()
                        raise
                    finally:
                        self.end_step(step, begin)
                except RankFailedError as error:
                    if not self.deaths.survives:
                        raise
                    self.deaths.found = error
        finally:
            transport.user = user

    def begin_step(self, scale: float, checks: Checks) -> Step:
        """Return a new step; see `Stream`."""
        log = self.transport.log
        if log is None:  # another reducer has used this transport, and was closed
            log = self.transport.log = []
        seed = self.settings["seed"]
        return Step(self.count, self.layout, self.transport, seed, scale, checks, log, self.last_step)

    def pass_gradients(
        self, step: Step, gradients: Mapping[str, Any], absent: Collection[str], lr: Any
    ) -> Mapping[str, Any] | None:
        """Check the gradients of this rank and return them; None if something is new or wrong: all ranks then agree."""
        layout = self.layout
        if lr is not None:
            try:
                step.record.lr = to_number("reduce", "lr", lr)
            except MpicompError as error:
                step.argument_problem = error
        step.inputs = inputs = layout.look(gradients, absent, step.argument_problem)
        if (
            inputs.problem is not None
            or inputs.buckets is not None
            or (absent and not step.checks.idle and not set(absent) <= set(layout.conditional))
            or step.checks.stale
            or self.loaded is not None
            or self.must_check_ranks
            or (stop.asked and not self.stop)
        ):
            return None
        if layout.entry.clip is not None:
            step.factor = step.scale * layout.clip_factor(gradients, step.scale, self.transport.group.size)
        return gradients

    def choose(self, step: Step, log: list[RoundLog]) -> Rounds[None] | tuple[()]:
        """Let the policy choose the plans of a step; as rounds, which are in ``log``, or an empty tuple without any."""
        begin = self.transport.timer()
        if self.plans and not step.frozen and self.planner.repeats():
            step.plans, step.repeats = self.plans, True
            step.record.choosing_s = self.transport.timer() - begin
            return ()
        return self._choose_anew(step, log, begin)

    def _choose_anew(self, step: Step, log: list[RoundLog], begin: float) -> Rounds[None]:
        transport, waited_s = self.transport, 0.0
        exchange = () if step.frozen else self.planner.refresh(transport)
        if exchange:
            transport.activity.purpose = "step %d", (step.record.step,)
            first = len(log)
            yield from exchange
            step.record.once = log[first:]
            waited_s = sum(entry.seconds for entry in log[first:])
            del log[first:]
        step.choose(self.planner, self.plans)
        step.record.choosing_s = transport.timer() - begin - waited_s

    def commit(self, step: Step) -> Rounds[dict[str, Any]]:
        """Keep the step or undo it, the same on all ranks, and return the means; none if it was ended. As rounds."""
        record, layout, transport = step.record, self.layout, self.transport
        stale = step.stale or not layout.buckets  # without buckets no message could have carried the flag
        while stale:
            if not (yield from self._agree(step)):
                return {}
            stale = step.stale
        finite = True
        if step.checks is not NO_CHECKS or step.nonfinite:
            finite = yield from self._finish_checks(step)
        unused: Collection[str] = ()
        if layout.conditional:
            flags = yield from self._share([name in step.inputs.absent for name in layout.conditional])
            unused = {name for name, ranks in zip(layout.conditional, flags.T, strict=True) if ranks.all()}
        # Applied by all that are left, or by none: later errors may occur on some of them alone.
        if self.deaths.survives and not transport.agree(True):
            raise AgreedRankFailure("a rank has died, as all that are left have agreed")
        self.count += 1
        self.last_step = record
        self.plans = step.plans
        record.exchanges, record.stop = step.done, self.stop
        if self.deaths.lost_ranks:
            record.lost_ranks, self.deaths.lost_ranks = self.deaths.lost_ranks, []
        means: dict[str, Any] = {}
        if step.damaged is None:
            if not finite and self.settings["nonfinite"] != "pass":
                step.undo()
                if self.settings["nonfinite"] == "raise":
                    raise nonfinite_error(record.step, step.nonfinite, step.has_overflowed)
                record.skipped = True
            means = step.commit(finite, record.skipped, unused)
        if step.repeats and finite and not record.skipped and self.learns_at_end:
            self.planner.on_step_end(record.step, ())
        telemetry = self.telemetry
        under_way = telemetry.work_under_way
        is_due = record.step % PACE_STEPS == PACE_STEPS - 1 or (under_way is not None and record.step >= under_way[0])
        if not step.frozen and (is_due or not step.repeats or telemetry.under_way):
            try:
                yield from self._report(step, finite)
            except RankFailedError:
                if not self.deaths.survives:
                    raise
                self.deaths.found = RankFailedError("a rank has died")  # the step is applied, here and elsewhere
        record.slowest_rank, record.slowest_costs_s = telemetry.slowest_rank, telemetry.slowest_costs_s
        if step.damaged is not None:  # in the last message: no later one could have informed the others
            step.undo()
            self.must_check_ranks = True
            raise MessageError(
                f"{step.damaged} (on rank {transport.group.rank}); nothing was applied on this rank, and at the next "
                "step all ranks compare whether that is so on all of them"
            )
        return means

    def _finish_checks(self, step: Step) -> Rounds[bool]:
        try:
            finite = yield from step.checks.finish(not step.nonfinite)
        except MpicompError:
            step.undo()
            raise
        raises = self.settings["nonfinite"] == "raise" and step.damaged is None
        if step.nonfinite and raises and not self.deaths.survives:
            are_finite = all(map(is_finite, step.inputs.gradients.values()))
            step.has_overflowed = not (yield from self._share([not are_finite])).any()
        return finite

    def _report(self, step: Step, finite: bool) -> Rounds[None]:
        transport, telemetry, planner, record = self.transport, self.telemetry, self.planner, step.record
        begin, first = transport.timer(), len(step.log)
        yield from telemetry.share_work(record.step)
        outcomes = [BucketOutcome(done.result.energy, done.result.gain, done.result.kept) for done in step.done]
        if finite and not record.skipped and not step.repeats:
            planner.on_step_end(record.step, outcomes)
        if telemetry.under_way and telemetry.under_way[0][0] <= record.step:
            yield from telemetry.receive(planner, record.step)
        surveys: dict[int, NDArray[np.float32]] = {}
        for done in step.done:
            if done.survey is not None:
                surveys[done.bucket.index] = done.survey
        if step.done and (surveys or planner.wants_telemetry):
            times = np.array([done.times(transport.offset) for done in step.done])
            report = StepReport(record.step, record.lr, self.plans, outcomes, times, surveys)
            yield from telemetry.publish(report, planner)
        record.choosing_s += transport.timer() - begin
        for entry in step.log[first:]:
            record.choosing_s -= entry.seconds

    def end_step(self, step: Step, begin: float, waited_s: float | None = None) -> None:
        """Record the seconds of a step, of which ``waited_s``, or those of its rounds, were spent waiting."""
        record, telemetry, end = step.record, self.telemetry, self.transport.timer()
        is_applied = self.last_step is record
        if is_applied:
            record.seconds = end - begin
            for entry in step.log:
                entry.task = entry.task.shape()
            record.overhead, self.transport.log = step.log, []
            for listener in tuple(trace.listeners) if trace.listeners else ():
                listener.on_step(record, step.done, self.number, self.transport)
        if telemetry.shares_work:
            if telemetry.ended is not None and is_applied and not record.agreed:  # others are not like the rest
                if waited_s is None:
                    waited_s = 0.0
                    for done in step.done:
                        for entry in done.log:
                            waited_s += entry.end - entry.begin
                telemetry.work_s.append(end - telemetry.ended - waited_s)
            telemetry.ended = end

    def _agree(self, step: Step) -> Rounds[bool]:
        record, layout = step.record, self.layout
        step.begin_again()
        yield from self.telemetry.drop()
        given = yield from step.checks.agree((step.inputs.gradients, step.inputs.absent))
        if given is None:
            return False
        if given[0] is not step.inputs.gradients:
            step.inputs = layout.look(*given, step.argument_problem)
        yield from self._compare_ranks(step)
        inputs = step.inputs
        assert inputs.members is not None
        absent = yield from self._absences(step, [member.name for member in inputs.members])
        record.agreed = True
        if inputs.buckets is not None:  # if only `absent` differs, buckets stay, and with them the state of policies
            yield from self._lay_out(step)
        names = {member.name for member in inputs.members}
        conditional = dict.fromkeys([*layout.conditional, *sorted(absent)])
        layout.conditional = [name for name in conditional if name in names]
        step.factor = step.scale * layout.clip_factor(inputs.gradients, step.scale, self.transport.group.size)
        ready = self.transport.timer()
        step.choose(self.planner, self.plans)
        for bucket in layout.buckets:
            yield from step.exchange(bucket, step.inputs.gradients, ready, step.log)
        return True

    def _compare_ranks(self, step: Step) -> Rounds[None]:
        planner, loaded, inputs, group = self.planner, self.loaded, step.inputs, self.transport.group
        signature, problem = None, inputs.problem
        if inputs.members is not None:
            signature = Signature(self._settings_of_step(inputs.gradients.values()), inputs.members)
        before = planner.state_dict()
        try:
            if loaded is not None:
                loaded.load_into(planner, group)
        except MpicompError as error:
            # A state of another policy explains more than a difference between ranks.
            problem, signature = problem or error, None
        try:
            yield from agree(signature, problem or step.damaged, group)
        except MpicompError:
            if loaded is not None:
                planner.load_state_dict(before, None)
            raise
        if loaded is not None:
            self.plans, self.count, self.loaded = (), loaded.step, None
        step.record.step = self.count
        self.must_check_ranks = False

    def _settings_of_step(self, gradients: Iterable[Any]) -> dict[str, Any]:
        state = self.loaded or LoadedState(self.count, self.planner.state_dict(), None)
        settings = self.settings | settings_of_state(state, self.loaded is not None, not self.must_check_ranks)
        if self.compressor.needs_identical_blas:
            where = "a GPU" if on_device(gradients) else "the host"
            settings[f"where gradients are, with compressor '{self.compressor.id}',"] = where
        return settings

    def _lay_out(self, step: Step) -> Rounds[None]:
        layout, transport, planner, log = self.layout, self.transport, self.planner, step.log
        members, buckets = step.inputs.members, step.inputs.buckets
        assert members is not None
        assert buckets is not None
        first = len(log)
        if layout.bucket_bytes is None:
            total = sum(member.numel * member.work_dtype.itemsize for member in members)
            limit = yield from planner.bucket_limit(total, transport)
            layout.bucket_bytes = LARGE_BUCKET if limit is None else min(limit, LARGE_BUCKET)
        once, before = log[first:], len(log)
        problem = None
        try:
            buckets = buckets or layout.make(members, step.inputs.gradients)
        except MemoryError as error:
            problem = no_memory(error, "reduce")
        yield from agree(None, problem, transport.group)
        layout.routes = yield from choose_routes([bucket.device for bucket in buckets], transport)
        routes, after = log[before:], len(log)
        yield from planner.start([bucket.shape for bucket in buckets], transport)
        step.record.once = [*step.record.once, *once, *log[after:]]
        log[first:] = routes  # overhead
        layout.adopt(members, buckets)
        step.checks.laid_out()
        layout.prefetch(step.inputs.gradients)
        self.plans = ()

    def _absences(self, step: Step, names: list[str]) -> Rounds[list[str]]:
        names = sorted(names)
        flags = [name in step.inputs.absent and not step.checks.idle for name in names]
        news = [stop.asked, step.inputs.buckets is not None]
        asked, differ, *rows = (yield from self._share([*news, *flags])).T
        if differ.any() and step.inputs.buckets is None:  # arrays of another rank alone have changed their device
            step.inputs.buckets = []
        self.stop = self.stop or bool(asked.any())
        return [name for name, ranks in zip(names, rows, strict=True) if ranks.any()]

    def _share(self, flags: list[bool]) -> Rounds[NDArray[np.uint8]]:
        return (yield from gather_rows(np.array(flags, np.uint8), self.transport.group))

    def _continue_without_dead(self, error: RankFailedError | None) -> Rounds[None]:
        """Continue with the remaining ranks from the state before the step, and the first one's policy. As rounds."""
        transport, deaths = self.transport, self.deaths
        if deaths.generation == transport.generation:
            transport.revoke()
            if not isinstance(error, AgreedRankFailure):
                transport.agree(False)
            deaths.lost_ranks = deaths.lost_ranks + transport.shrink()
        deaths.generation, deaths.found = transport.generation, None
        state = self.state_dict()
        shared = {name: state[name] for name in ("step", "policy", "cost")}
        state |= yield from from_one(shared, transport.group, "reducer")
        deaths.layouts.append(self.layout)
        self._configure(self.policy.get_config() | {"warmup": self.policy.warmup, "cost": self.policy.known_cost})
        self.policy.warmup, self.policy.serves = self.settings["warmup"], True
        self.load_state_dict(state)
        if callable(deaths.reaction) and deaths.lost_ranks:
            deaths.reaction(list(deaths.lost_ranks), transport.group.size)

    def stream(self, thread: ProgressThread, scale: float = 1.0, checks: Checks = NO_CHECKS) -> Stream | None:
        """Begin a step whose arrays are passed one by one, and exchanged by a thread meanwhile.

        None if all arrays have to be there first, the same on all ranks: at the first step, and if gradients are
        clipped by the norm of all of them. Collective, as rounds are: between this and `Stream.finish` nothing else of
        this reducer may be called.
        """
        if self._closed:
            raise self._closed_error()
        if not self.layout.buckets or self.layout.entry.clip is not None:
            return None
        return Stream(self, thread, scale, checks)

    def residual(self, name: str) -> NDArray[np.floating]:
        """Return a copy of the residual of an array, shaped like it.

        Zeros without feedback. 16-bit arrays have float32 residuals.

        Raises
        ------
        UnknownNameError
            If no such array was reduced.
        """
        return self.layout.residual(name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that has to survive a restart, on this rank.

        Returns
        -------
        dict
            ``schema``, ``step``, ``settings``; ``residuals`` and ``velocities`` (of momentum correction): copied
            arrays by name; ``memories`` of compressors by the first name of each bucket; ``policy``: its state;
            ``cost``: the cost model, or None.
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
        """Load the result of `state_dict`. Each rank loads its own; not collective.

        At the next step the ranks compare the loaded step and the state of the policy, which have to be the same on all
        of them; all of them have to load. A cost model of another number of hosts is left out.

        Raises
        ------
        ConfigurationError
            If the state is not a reducer's, or a residual has another shape than its array. Nothing is loaded then.
        """
        if not isinstance(state, Mapping) or state.get("schema") != _SCHEMA or "residuals" not in state:
            raise ConfigurationError("reducer: the state is not one that Reducer.state_dict gave; nothing was loaded")
        step = to_whole("reducer", "the state's step", state.get("step"), 0)
        cost = None if state.get("cost") is None else CostModel.from_json(state["cost"])
        self.layout.load(state)
        self.loaded = LoadedState(step, state.get("policy", {}), cost)

    def drop_loaded_state(self) -> None:
        """Leave out a state that was loaded since the last step: its residuals become zeros. Not collective."""
        self.layout.load({})
        self.loaded = None

    def close(self) -> None:
        """Release its MPI resources. It waits for no other rank, and a second call does nothing."""
        if not self._closed:
            self._closed = True
            self.transport.log = None
            self.layout.close()
            if self._owned:
                self.transport.close()
            else:
                self.transport.retire(self._user)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _closed_error(self) -> ClosedError:
        return ClosedError("reducer: it was closed; make a new one")
