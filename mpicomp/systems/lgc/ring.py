"""The mean of all ranks' codes, which every rank decodes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.collectives.scheme import Result, Scheme, check_undamaged, far_from_largest, gain_of, mean_at
from mpicomp.compressors.accumulated import TRAILER, Accumulated
from mpicomp.compressors.context import Context
from mpicomp.compressors.dense import Dense
from mpicomp.compressors.wire import DAMAGED, Selection
from mpicomp.gpu import to_python
from mpicomp.mpi.rounds import Group, Round, Rounds
from mpicomp.systems.lgc.autoencoder import Autoencoder
from mpicomp.systems.lgc.compressor import LGC
from mpicomp.systems.lgc.leader_message import Frame, LeaderMessage, leader_of, relative, share_selection

# Squared norms of a rank's whole array and of its uncoded values; then the product of its coded values with its share
# of the decoded ones, and the squared norm of this share, both before scaling.
_REPORT = np.dtype([("energy", "<f8"), ("sparse", "<f8"), ("match", "<f8"), ("decoded", "<f8")])
_DAMAGED = -1.0  # in place of the last of them, if a rank could not parse a message
_BYTE = np.dtype(np.uint8)


class CodeRing:
    """The third phase of LGC, ring instance.

    A bcast of indices and divisors; the inner collective's sum of codes and uncoded values; and an allgatherv of some
    norms, from which all ranks compute the factor for decoded values that loses least energy over all ranks.
    """

    def __init__(self, compressor: LGC, code: Autoencoder, inner: Scheme[Dense]) -> None:
        self._compressor = compressor
        self._code = code
        self._sum = inner

    def rounds(self, numel: int, dtype: np.dtype[Any], group: Group, step: int) -> list[Round]:
        lead = self._lead(numel)
        coded = lead.selected.coded_count
        travels = self._code.length(coded) + lead.selected.count - coded
        return [
            lead.round(leader_of(Context(group=group, step=step))),
            *self._sum.rounds(travels, dtype, group, step),
            _report_round(group),
        ]

    def exchange(self, accumulated: Accumulated, context: Context) -> Rounds[tuple[Result, float]]:
        workspace, dtype, code = context.workspace, accumulated.dtype, self._code
        lead = self._lead(accumulated.numel)
        # 1. One rank, drawn at random, broadcasts its indices and the divisors of values.
        received = yield from share_selection(lead, accumulated, context)
        coded, count = lead.selected.coded, lead.selected.coded_count
        length = code.length(count)
        # 2. Encode this rank's values there, and sum the codes; uncoded values travel with them.
        values = received.values[coded]
        shares = workspace.array("relative", count, dtype)
        relative(values, received.divisors, shares)
        end = length + received.values.size - count
        travels = workspace.array("code", end + TRAILER, dtype)
        code.begin_step(context.step)
        code.encode(shares, travels[:length])
        travels[length : length + coded.start] = received.values[: coded.start]
        travels[length + coded.start : end] = received.values[coded.stop :]
        moments = accumulated.device_moments
        part = Accumulated.ready(travels, moments.energy, 0.0, moments.finite, accumulated.stale)
        summed = yield from self._sum.exchange(part, context)
        assert not isinstance(summed.sent, Selection)
        summed_mean = summed.mean_array(part, workspace)

        # 3. Decode the mean of codes, and this rank's share of it.
        decoded = workspace.array("decoded", count, dtype)
        code.decode_near(summed.sent[:length], summed_mean[:length], shares, decoded)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            np.multiply(shares, received.divisors, out=shares)
            np.multiply(decoded, received.divisors, out=decoded)
        # 4. Gather how well decoded values fit, and scale them by the factor that loses least over all ranks.
        task = _report_round(context.group)
        energy, sparse, match, share_energy, coded_energy = to_python(
            moments.energy,
            kernels.energy(travels[length:end]),
            product(values, shares),
            kernels.energy(shares),
            kernels.energy(values),
        )
        problem = received.problem or summed.problem
        report = energy, sparse, float(match), share_energy if problem is None else _DAMAGED
        task.send = np.array([report], _REPORT).view(_BYTE)
        task.recv = workspace.host_array("report", sum(task.counts), _BYTE)
        everyones = (yield task).view(_REPORT)
        check_undamaged("learned", DAMAGED * bool((everyones["decoded"] == _DAMAGED).any()), problem)
        with np.errstate(over="ignore", invalid="ignore"):
            # The least error over all ranks. Where a sum is not finite, a rank has flagged it, or neither is the mean
            matches, norms = float(everyones["match"].sum()), float(everyones["decoded"].sum())
            best = float(dtype.type(matches / norms)) if matches > 0 and norms > 0 else 0.0
            factor = 1.0 if self._compressor.published else best
            unsent = everyones["energy"] - everyones["sparse"] - 2 * factor * everyones["match"]
            lost = float(np.maximum(unsent + factor * factor * everyones["decoded"], 0).sum())
            energies = everyones["energy"] + factor * factor * everyones["decoded"]
            missed = max(coded_energy + factor * (factor * share_energy - 2 * match), 0.0)  # NaN stays

        mean, sent = (workspace.array(f"learned {name}", received.values.size, dtype) for name in ("mean", "sent"))
        for out, results, total in ((mean, decoded, summed_mean), (sent, shares, summed.sent)):
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                np.multiply(results, dtype.type(factor), out=out[coded])
            out[: coded.start] = total[length : length + coded.start]
            out[coded.stop :] = total[length + coded.start : end]
        # Each rank's values and residual are finite with these energies, which all ranks know.
        finite = all(far_from_largest(energy, dtype) for energy in energies.tolist())
        [mean_finite] = to_python(np.isfinite(mean).all())
        result = Result(
            mean=mean_at(received.indices, mean),
            sent=Selection(received.indices, received.values if self._compressor.error == "selected" else sent),
            energy=summed.energy,
            gain=gain_of(lost, float(everyones["energy"].sum())),
            kept=float(received.values.size),
            nonfinite=summed.nonfinite or not finite or not mean_finite,
            stale=summed.stale,
        )
        return result, 1 - gain_of(missed, coded_energy)  # of this rank's share in the decoded values

    def _lead(self, numel: int) -> LeaderMessage:
        selected = self._compressor.selected(numel)
        return LeaderMessage(selected, numel, Frame(selected, self._compressor.signs))


def _report_round(group: Group) -> Round:
    return Round("allgatherv", [_REPORT.itemsize] * group.size, _BYTE)


def product(first: NDArray[np.floating], second: NDArray[np.floating]) -> float:
    """Return the product of two vectors, summed in float64; it may be NaN or infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        summed: float = np.einsum("i,i->", first, second, dtype=np.float64)
    return summed
