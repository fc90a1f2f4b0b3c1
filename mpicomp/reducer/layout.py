"""The state that lives from step to step: arrays in buckets, and their residuals and velocities."""

import copy
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import ArraySpec, describe, from_host, to_host
from mpicomp.compressors.base_compressor import Entry
from mpicomp.errors import ConfigurationError, MpicompError, UnknownNameError
from mpicomp.gpu import HOST, Device, MeanPart, common_device, device_array
from mpicomp.gpu.routes import RouteTable
from mpicomp.reducer.agreement import no_memory
from mpicomp.reducer.bucket import Bucket, make_buckets

LARGE_BUCKET = 32 << 20  # bytes of a bucket by default
_STATES = ("residuals", "velocities")  # arrays that live from step to step, each a method of Bucket


@dataclass
class Inputs:
    """The arrays that one rank passes to a step."""

    gradients: Mapping[str, Any]
    absent: Collection[str]
    """Names of zeros that stand for no gradient."""
    members: list[ArraySpec] | None = None
    buckets: list[Bucket] | None = None
    """New ones, where the arrays are not those of the layout."""
    problem: MpicompError | None = None
    """Error in them, or in another argument."""


class SpecCache:
    """Returns the specs of every step's arrays, computed only if name, kind, dtype, shape or layout has changed."""

    def __init__(self) -> None:
        self.described: list[ArraySpec] = []  # specs of the last arrays
        self.on_host = False  # whether these are NumPy arrays that need no conversion
        self._kind: type | None = None
        self._looks: list[tuple[Any, ...]] = []

    def describe(self, arrays: Mapping[str, Any]) -> list[ArraySpec]:
        """Return the specs, a read-only list, or raise as `describe` does."""
        if type(arrays) is self._kind and len(arrays) == len(self._looks):
            looks = zip(arrays.items(), self._looks, strict=True)
            for (name, array), (known, kind, dtype, shape, layout, device) in looks:
                if name != known or type(array) is not kind or array.dtype != dtype or array.shape != shape:
                    break
                if (device is not None and array.device != device) or (layout is not None and array.layout != layout):
                    break
            else:
                return self.described
        self._kind = None
        self.described = describe(arrays)
        self._looks = [
            (
                name, type(array), array.dtype, array.shape, getattr(array, "layout", None),
                None if isinstance(array, np.ndarray) else array.device,
            )
            for name, array in arrays.items()
        ]  # fmt: skip
        self._kind = type(arrays)
        self.on_host = all(kind is np.ndarray and dtype.kind == "f" for _, kind, dtype, *_ in self._looks)
        return self.described


class Layout:
    """Arrays by name in buckets, with their residuals; those of arrays that are missing wait for their names."""

    def __init__(
        self, feedback: bool, bucket_bytes: int | None, entry: Entry, threads: int, decay: float = 1.0
    ) -> None:
        self.members: list[ArraySpec] | None = None  # in the order in which they were first passed
        self.buckets: list[Bucket] = []  # in the order of exchange
        self.delivered: dict[str, NDArray[np.uint16]] = {}  # receive the means of 16-bit arrays
        self.holds_gradients = False  # whether gradients may lie in the buckets' memory, see `gradient`
        self.conditional: list[str] = []  # arrays for which some rank had no gradient in some step
        self._known: dict[str, ArraySpec] = {}
        self._bucket_of: dict[str, Bucket] = {}
        self._feedback = feedback
        self._decay = decay
        self.bucket_bytes = bucket_bytes  # length at which arrays are cut into buckets; None until it is known
        self.entry = entry
        self.describer = SpecCache()
        self.routes: RouteTable | None = None  # to MPI from the buckets' GPU, once measured; else messages are staged
        self.empty: list[ArraySpec] = []  # arrays without elements, which are in no bucket
        self._copies: dict[str, NDArray[Any]] = {}  # of this step: arrays of GPUs that are exchanged on the host
        self.stages = False  # whether some array is converted
        self._threads = threads
        self._kept: dict[str, dict[str, NDArray[np.floating]]] = {kind: {} for kind in _STATES}
        self._memories: dict[str, dict[str, Any]] = {}

    def look(self, gradients: Mapping[str, Any], absent: Collection[str], problem: MpicompError | None) -> Inputs:
        """Return the arrays of a step, with buckets where they are others than before; a ``problem`` is passed on."""
        inputs = Inputs(gradients, absent, None, None, problem)
        try:
            inputs.members = members = self.describer.describe(gradients)
            if members is not self.members and not (self.knows(members) and self._has_devices_of(gradients)):
                self.check(members)
                # Without a limit nothing is allocated twice: `Reducer` makes the buckets once there is one.
                inputs.buckets = [] if self.bucket_bytes is None else self.make(members, gradients)
            if not self.describer.on_host:
                self.prefetch(gradients)
        except MpicompError as error:
            inputs.problem = error
        except MemoryError as error:  # mostly here, where a step's arrays are made; later ones are used again
            inputs.problem = no_memory(error, "reduce")
        return inputs

    def knows(self, members: Sequence[ArraySpec] | None) -> bool:
        """Return whether these are its arrays, in any order."""
        if members is None or self.members is None:
            return False
        return members == self.members or set(members) == set(self.members)

    def _has_devices_of(self, gradients: Mapping[str, Any]) -> bool:
        """Return whether each bucket is on the device of its gradients, which a model may have left."""
        return self.describer.on_host or all(
            bucket.device is common_device([gradients[name] for name in bucket.names]) for bucket in self.buckets
        )

    def check(self, members: Sequence[ArraySpec]) -> None:
        """Refuse arrays whose residual has another shape."""
        shapes = {name: residual.shape for name, residual in self._kept["residuals"].items()}
        if self._feedback:
            shapes |= {member.name: member.shape for member in self.members or ()}
        for member in members:
            _check_shape(member, shapes.get(member.name))

    def make(self, members: Sequence[ArraySpec], arrays: Mapping[str, Any]) -> list[Bucket]:
        """Return buckets for other arrays, each on the device of its arrays."""

        def device_of(group: Sequence[ArraySpec]) -> Device:
            return common_device([arrays[member.name] for member in group])

        limit = LARGE_BUCKET if self.bucket_bytes is None else self.bucket_bytes
        buckets = make_buckets(members, self._feedback, limit, self.entry, self._threads, device_of, self._decay)
        for bucket in buckets:
            bucket.holds_gradients = self.holds_gradients and not self.entry.momentum  # that could not be undone
        return buckets

    def adopt(self, members: list[ArraySpec], buckets: list[Bucket]) -> None:
        """Replace arrays and buckets; residuals follow their names."""
        for kind in _STATES:
            self._kept[kind] = self._states(kind)
        self._memories |= {bucket.members[0].name: bucket.memory_on_host() for bucket in self.buckets}
        self.members = members
        self.buckets = buckets
        self.empty = [member for member in members if member.numel == 0]
        self._known = {member.name: member for member in members}
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
        self.delivered = {
            member.name: self.device_of(member.name).empty(member.numel, np.uint16)
            for member in members
            if member.dtype.endswith("float16")
        }
        self._restore()

    def has(self, name: str) -> bool:
        """Return whether some bucket has an array."""
        return name in self._bucket_of

    def device_of(self, name: str) -> Device:
        """Return the device of an array's bucket; the host if it is in none."""
        return self._bucket_of[name].device if name in self._bucket_of else HOST

    def gradient(self, name: str) -> NDArray[np.floating] | None:
        """Return the memory in which an array's gradient may lie, shaped; None if it may not, or has another dtype."""
        member, bucket = self._known.get(name), self._bucket_of.get(name)
        if member is None or bucket is None or not bucket.holds_gradients or member.dtype != bucket.dtype.name:
            return None
        return bucket.gradient(name).reshape(member.shape)

    def begin_step(self) -> None:
        """Note that copies of arrays are out of date."""
        self._copies.clear()

    def prefetch(self, gradients: Mapping[str, Any]) -> None:
        """Bring gradients to the devices of their buckets, in the thread that made them: its stream is the current one.

        A bucket on a GPU notes how far that stream has come; a GPU's gradients without CuPy are copied to the host.
        """
        if self.describer.on_host:
            return
        there: dict[int, list[Any]] = {}
        self.stages = True
        for name, gradient in gradients.items():
            bucket = self._bucket_of.get(name)
            if bucket is None:
                continue
            if bucket.device is not HOST:
                there.setdefault(bucket.index, []).append(gradient)
            elif name not in self._copies and device_array(gradient) is not None:
                self._copies[name] = to_host(gradient)
        for index, arrays in there.items():
            self.buckets[index].device.mark(arrays, self.buckets[index].order)

    def inputs_of(self, bucket: Bucket, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of a bucket on its device, or as host arrays that can be copied to it at once."""
        if bucket.device is not HOST or self.describer.on_host:
            return gradients
        self.stages = True
        return [
            self._copies[name] if name in self._copies else to_host(gradient)
            for name, gradient in zip(bucket.names, gradients, strict=True)
        ]

    def clip_factor(self, gradients: Mapping[str, Any], scale: float, ranks: int) -> float:
        """Return the factor that clips this rank's scaled gradients: 1 without clipping, or if they are not finite."""
        if self.entry.clip is None:
            return 1.0
        energy = scale**2 * sum(
            bucket.energy(self.inputs_of(bucket, [gradients[name] for name in bucket.names])) for bucket in self.buckets
        )
        limit = self.entry.clip / math.sqrt(ranks)
        return limit / math.sqrt(energy) if limit**2 < energy < math.inf else 1.0

    def unflatten(
        self, bucket: Bucket, mean: Any, gradients: Mapping[str, Any], unused: Collection[str]
    ) -> dict[str, Any]:
        """Return the means of a bucket's arrays by name, of the kinds of the gradients.

        An ``unused`` array, for which no rank has a gradient, is among them only if its residual was sent.
        """
        if unused:
            with bucket.device.active():
                parts = [
                    (member, start)
                    for member, start in zip(bucket.members, bucket.offsets, strict=True)
                    if member.name not in unused or mean[start : start + member.numel].any()
                ]
            return self._unflatten(mean, parts, gradients, bucket)
        described, returned = self.describer.described, bucket.last.means
        for same in (operator.is_, _is_same):
            for known in returned:
                if known[1] is described and same(known[0], mean):
                    return known[2].copy()
        means = self._unflatten(mean, list(zip(bucket.members, bucket.offsets, strict=True)), gradients, bucket)
        if self.describer.on_host and not self.delivered:
            if len(returned) > 1:  # the bucket's two arrays
                returned.clear()
            returned.append((mean, described, means.copy()))
        return means

    def unflatten_empty(self, gradients: Mapping[str, Any], unused: Collection[str]) -> dict[str, Any]:
        """Return the means of arrays without elements."""
        means: dict[str, Any] = {}
        for member in self.empty:
            if member.name not in unused:
                means |= self._unflatten(np.empty(0, member.work_dtype), [(member, 0)], gradients, None)
        return means

    def _unflatten(
        self, mean: Any, parts: Sequence[tuple[ArraySpec, int]], gradients: Mapping[str, Any], bucket: Bucket | None
    ) -> dict[str, Any]:
        wanted = [
            MeanPart(start, member, gradients[member.name], self.delivered.get(member.name)) for member, start in parts
        ]
        if bucket is None or bucket.device is HOST:
            means = [from_host(part.cut(mean), part.described, part.like, part.out) for part in wanted]
        else:
            means = bucket.device.unflatten(mean, wanted, bucket.order)
        return {part.described.name: array for part, array in zip(wanted, means, strict=True)}

    def close(self) -> None:
        """Release copies of arrays."""
        self._copies.clear()

    def residual(self, name: str) -> NDArray[np.floating]:
        """Return a copy of an array's residual; see `mpicomp.Reducer.residual`."""
        member = self._known.get(name)
        if member is not None:
            bucket = self._bucket_of.get(name)
            if bucket is None or not self._feedback:
                return np.zeros(member.shape, member.work_dtype)
            return self._copied(name, bucket.residual(name)).reshape(member.shape)
        if name in self._kept["residuals"]:
            return self._kept["residuals"][name].copy()
        raise UnknownNameError("residual", name, [member.name for member in self.members or ()])

    def state(self) -> dict[str, Any]:
        """Return copies of residuals and velocities by name, and the memories of compressors."""
        memories = {bucket.members[0].name: bucket.memory_on_host() for bucket in self.buckets if bucket.memory}
        return {"memories": copy.deepcopy(self._memories | memories)} | {kind: self._states(kind) for kind in _STATES}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state`, or raise `ConfigurationError` for another shape and load nothing."""
        loaded = {
            kind: {name: np.array(value, copy=True) for name, value in state.get(kind, {}).items()} for kind in _STATES
        }
        for member in self.members or ():
            for arrays in loaded.values():
                held = arrays.get(member.name)
                _check_shape(member, None if held is None else held.shape)
        self._kept = loaded
        self._memories = copy.deepcopy(dict(state.get("memories", {})))
        for kind in _STATES:
            for name, array in self._held(kind).items():
                with self.device_of(name).active():
                    array[:] = 0
        self._restore()

    def _restore(self) -> None:
        for kind in _STATES:
            for name, array in self._held(kind).items() if self._kept[kind] else ():
                if name in self._kept[kind]:
                    values = self._kept[kind].pop(name).reshape(-1).astype(array.dtype, copy=False)
                    self.device_of(name).assign(array, values)
        for bucket in self.buckets:
            bucket.memory = self._memories.pop(bucket.members[0].name, bucket.memory)

    def _held(self, kind: str) -> dict[str, NDArray[np.floating]]:
        if not self._feedback:
            return {}
        parts = (getattr(bucket, kind)() for bucket in self.buckets)
        return {member.name: part for members in parts for member, part in members}

    def _states(self, kind: str) -> dict[str, NDArray[np.floating]]:
        shapes = {member.name: member.shape for member in self.members or ()}
        held = {name: self._copied(name, item).reshape(shapes[name]) for name, item in self._held(kind).items()}
        empty = {name: np.zeros(shape) for name, shape in shapes.items() if 0 in shape and self._feedback}
        kept = {name: item.copy() for name, item in self._kept[kind].items()}
        return held | (empty if kind == "residuals" else {}) | kept

    def _copied(self, name: str, value: Any) -> NDArray[np.floating]:
        device = self.device_of(name)
        return value.copy() if device is HOST else device.to_host(value)


def _is_same(first: NDArray[Any], second: NDArray[Any]) -> bool:
    return (
        first.size == second.size
        and first.dtype == second.dtype
        and first.__array_interface__["data"] == second.__array_interface__["data"]
    )


def _check_shape(member: ArraySpec, shape: tuple[int, ...] | None) -> None:
    if shape is not None and shape != member.shape:
        raise ConfigurationError(
            f"reducer: the residual of '{member.name}' has shape {shape} and cannot be kept for shape {member.shape}; "
            "make a new Reducer to start it at zero"
        )
