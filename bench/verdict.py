"""Verdict on a run in plain words: whether compression paid, from wire bytes and seconds."""

from mpicomp.bench.measure.chosen_plans import chosen_table
from mpicomp.bench.measure.timings import PHASES
from mpicomp.bench.outcome import Outcome

from mpicomp.compressors import Compressor, Dense

_NOISE = 0.03  # differences below this share of a step say nothing
_ALWAYS = 0.95  # share of the exchanged elements from which on a plan counts as run always; the rest was explored


def judge(outcome: Outcome, dense: Outcome | None = None, quality_name: str = "quality") -> str:
    """Return whether compression paid in seconds, and the delay of gradients; where plans changed, of the second half.

    With a dense run of the same seed the verdict has both qualities; without one it says that they were not compared.
    """
    if outcome.ranks == 1:
        return "one rank: nothing was exchanged, so there was nothing to gain; start it with mpiexec -n 4"
    compressed = [plan.share for plan in outcome.late_plans if not _is_exact(plan.compressor)]
    parts = [_judge_seconds(outcome)]
    if sum(compressed) >= 1 - _ALWAYS:
        parts.append(_late(outcome.delay, dense is not None))
    if dense is not None:
        parts.append(
            f"{quality_name} {outcome.quality:.4f}, and {dense.quality:.4f} with dense exchange from the same seed, "
            f"whose steps took {dense.median_step_s:.3f} s"
        )
    slowest = outcome.slowest
    if slowest is not None and slowest.matters(outcome.median_step_s, _NOISE):
        parts.append(
            f"rank {slowest.rank} is slow: a step takes it {slowest.costs_s:.3f} s more work than the middle rank, and "
            "the others wait for it"
        )
    return "; ".join(parts)


def _is_exact(compressor: Compressor) -> bool:
    return compressor == Dense()


def _late(delay: float | None, compared: bool) -> str:
    """Return the delay of gradients in words, with the note that quality was not compared where it was not."""
    late = (
        "no delay to measure, since there is no error feedback"
        if delay is None
        else f"delay {_steps(delay)} steps: so many steps' worth of gradient energy wait in residuals"
    )
    return late if compared else f"{late}; quality was not compared with dense exchange"


def _steps(delay: float) -> str:
    if 0 < delay < 0.01:
        return "under 0.01"
    return f"{delay:.0f}" if delay >= 10 else f"{delay:.2g}"


def _judge_seconds(outcome: Outcome) -> str:
    times = outcome.dense_wire_bytes / outcome.wire_bytes if outcome.wire_bytes else float("inf")
    dense, step_s = outcome.dense_step_s, outcome.late_step_s
    fewer = f"{times:.1f} times fewer bytes left each rank than with a dense ring"
    if _is_exact(outcome.compressor):
        if not outcome.adapts:
            return f"dense exchange: nothing was compressed; a step took {step_s:.3f} s"
        share = sum(plan.share for plan in outcome.late_plans if plan.compressor.message == "dense")
        mostly = "" if share > _ALWAYS else f" for {100 * share:.0f} % of the later steps"
        return (
            f"mpicomp chose dense exchange{mostly}: nothing that sends enough of the gradient beats it here; "
            f"a step took {step_s:.3f} s"
        )
    if dense is None:
        return f"none, since no dense exchange was measured: a step took {step_s:.3f} s, and {fewer}"
    ratio = dense / step_s
    if ratio > 1 + _NOISE:
        return (
            f"compression paid in seconds: a step took {step_s:.3f} s, {_faster(ratio)} than "
            f"the {dense:.3f} s with a dense exchange here, and {fewer}"
        )
    if ratio < 1 - _NOISE:
        return (
            f"compression did not pay in seconds: a step took {step_s:.3f} s, with a dense exchange it would take "
            f"{dense:.3f} s here, although {fewer}; use --compressor dense on this network"
        )
    return f"compression made no difference to the time of a step ({step_s:.3f} s), and {fewer}"


def _faster(ratio: float) -> str:
    return f"{ratio:.1f} times faster" if ratio >= 2 else f"{100 * (ratio - 1):.0f} % faster"


def table(outcome: Outcome, quality_name: str, steps: int) -> str:
    """Return the measurements that the verdict rests on, a line each."""
    median, made = outcome.median_step_s, steps - outcome.resumed_at
    lines = [
        f"{quality_name}: {outcome.quality:.4f} after {steps} steps",
        f"seconds a step: {median:.4f} (median of {outcome.steps_timed}, slowest rank), of which",
    ]
    lines += [
        f"  {name:<9}{outcome.phases_s[name]:.4f}  {100 * outcome.phases_s[name] / median:5.1f} %" for name in PHASES
    ]
    lines.append(f"choosing plans: {outcome.choosing_s:.4f} s a step, {100 * outcome.choosing_s / median:.1f} % (mean)")
    lines += [
        f"bytes that left a rank: {outcome.wire_bytes / made:,.0f} a step, "
        f"dense ring {outcome.dense_wire_bytes / made:,.0f}",
        f"bytes at the start, once: {outcome.once_bytes:,}",
    ]
    if outcome.exchange_probe is not None and outcome.dense_probe is not None:
        lines.append(
            f"an exchange without waiting: {outcome.exchange_s:.4f} s; dense {outcome.dense_probe.seconds:.4f} s "
            f"by {outcome.dense_probe.collective}, the fastest (medians of {outcome.exchange_probe.repeats} and "
            f"{outcome.dense_probe.repeats})"
        )
    if outcome.gain is not None:
        lines.append(f"gain (share of the accumulated gradient's energy that was sent): {outcome.gain:.3f}")
    if outcome.delay is not None:
        late = "energy that waits in residuals over what a step sends, second half"
        lines.append(f"delay ({late}): {outcome.delay:.3g} steps")
    lines.append(chosen_table(outcome.plans, outcome.layers))
    if outcome.correlations is not None:
        lines.append(outcome.correlations.table())
    return "\n".join(lines)
