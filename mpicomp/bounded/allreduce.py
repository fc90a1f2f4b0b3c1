"""The mean or sum of a single array without state, compressed or within an error bound."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.arrays import ArraySpec, check_not_masked
from mpicomp.bounded.bounded_sum import bounded_sum, grid_of
from mpicomp.collectives import fitting
from mpicomp.compressors import Compressor, get_compressor
from mpicomp.errors import ArrayTypeError, ConfigurationError, MpicompError
from mpicomp.kernels.cpu.compile import check_compiler
from mpicomp.mpi import Transport
from mpicomp.mpi.connect import connect, run_over
from mpicomp.mpi.rounds import Group, Round, Rounds, gather_rows
from mpicomp.reducer.agreement import Signature, agree, compare, digest_round, no_memory, report_of
from mpicomp.reducer.reducer import Reducer
from mpicomp.reducer.settings import check_arguments
from mpicomp.setting_checks import check_choice, check_range

_REALS = {"float32": "float32", "float64": "float64", "complex64": "float32", "complex128": "float64"}
_MIN_ERROR = {"float32": 1e-37, "float64": 1e-280}  # below, roundings of subnormal numbers would count
_MIN_RELATIVE_ERROR = 1e-16  # of a range; float64 has no closer numbers at its ends
_MAX_ERROR = 1e290  # so that steps and their multiples are finite

_world: Callable[[], Transport] = functools.cache(connect)  # which duplicates MPI.COMM_WORLD once, not at every call


@check_arguments("allreduce", world=lambda: _world())
def allreduce(
    array: Any,
    compressor: Compressor | str | Mapping[str, Any] | None = None,
    comm: Any = None,
    *,
    error: float | None = None,
    relative: bool = False,
    op: str = "mean",
    out: NDArray[Any] | None = None,
) -> Any:
    """Average or add one array over the ranks without state, compressed, within an error bound, or by MPI's sum.

    Collective over ``comm``. With a compressor elements that are not sent are lost. To average arrays in every step use
    a `Reducer`, which keeps unsent elements, its buffers and its communicator.

    With ``error`` every element of the result differs from the exact one by at most that: ranks add integers on a
    shared grid, in packed blocks (see docs/collectives.md). Blocks of much larger numbers are sent uncoded. For
    results above about 8 million times ``error`` in float32, 1e15 times in float64, the dtype has no closer numbers:
    there one spacing of its numbers is added. NaN and infinity are as in any sum. ``op="sum"`` with neither is MPI's
    sum, after ranks have compared their arrays.

    Parameters
    ----------
    array : array
        NumPy, CuPy or torch; float16, bfloat16, float32 or float64; not modified. With ``error`` or ``op="sum"`` a
        NumPy array of float32, float64 or complex numbers, of any shape and strides.
    compressor : Compressor, str, mapping or None
        None is dense. Not together with ``error``.
    comm : mpi4py.MPI.Comm, Transport or None
        None stands for MPI.COMM_WORLD.
    error : float, optional
        Absolute bound, the same on all ranks; for complex numbers that of each part. At least 1e-37 for float32 and
        1e-280 for float64.
    relative : bool
        Whether ``error`` is a share of the arrays' range, at most 1: of their largest less their smallest finite
        number, averaged over the ranks, or added with ``op="sum"``. The range of the result is at most so large.
    op : {"mean", "sum"}
        ``"sum"`` takes no compressor.
    out : numpy.ndarray, optional
        With ``error`` or ``op="sum"``, where the result is written: of the same shape and dtype, possibly ``array``
        itself.

    Returns
    -------
    array
        Of the same kind, dtype and shape, the same bits on every rank. A mean without ``error`` is read-only.

    Raises
    ------
    ConfigurationError, ArrayTypeError, DisagreementError
        On all ranks, before any data moves.

    Examples
    --------
    >>> import numpy as np
    >>> from mpicomp.mpi import LocalWorld
    >>> allreduce(np.array([3, -5, 1], np.float32), "dense", LocalWorld(1).transports[0]).tolist()
    [3.0, -5.0, 1.0]
    >>> world = LocalWorld(2)
    >>> arrays = np.array([[3.0, 4.0], [4.0, 4.5]])
    >>> ends = zip(arrays, world.transports, strict=True)
    >>> means = world.run([bounded_rounds(array, None, 0.1, "mean", None, end.group) for array, end in ends])
    >>> bool(abs(means[0] - [3.5, 4.25]).max() <= 0.1), means[0].tolist() == means[1].tolist()
    (True, True)
    """
    if error is None and op == "mean" and out is None and not relative:
        return _compressed_mean(array, compressor, comm)
    if comm is None:
        world = _world()
        return world.run(bounded_rounds(array, compressor, error, op, out, world.group, relative))
    return run_over(comm, lambda group: bounded_rounds(array, compressor, error, op, out, group, relative))


def _compressed_mean(array: Any, compressor: Compressor | str | Mapping[str, Any] | None, comm: Any) -> Any:
    chosen = get_compressor("dense" if compressor is None else compressor)
    # A single call has nothing to learn from: the collective is the first that fits.
    reducer = Reducer(chosen, fitting(chosen)[0], feedback=False, comm=_world() if comm is None else comm)
    try:
        return reducer.reduce({"array": array})["array"]
    finally:
        reducer.close()


def bounded_rounds(
    array: Any,
    compressor: Any,
    error: float | None,
    op: str,
    out: NDArray[Any] | None,
    group: Group,
    relative: bool = False,
) -> Rounds[NDArray[Any]]:
    """Run `allreduce` with a bound, or of a sum, as a generator of rounds."""
    if error is None and op == "sum" and compressor is None and isinstance(array, np.ndarray | np.generic):
        known = _known_sums.get((array.dtype, array.shape))
        if known is not None and known.group is group and not relative and known.takes(array, out):
            return (yield from known.rounds(array, out))
    signature: Signature | None = None
    problem: MpicompError | None = None
    try:
        check_compiler()
        bound = _check_bound(array, compressor, error, op, relative)
        dtype = array.dtype.newbyteorder("=")
        result = np.empty(array.shape, dtype) if out is None else _check_out(out, array.shape, dtype)
        signature = Signature(
            {"error": bound, "relative": relative, "op": op}, [ArraySpec("array", dtype.name, array.shape)]
        )
        flat = np.ascontiguousarray(array, dtype).reshape(-1)
        direct = result.reshape(-1) if result.flags.c_contiguous else np.empty(flat.size, dtype)
    except MpicompError as found:
        problem = found
    except MemoryError as found:
        problem = no_memory(found, "allreduce")
    yield from agree(signature, problem, group, "allreduce")
    real = _REALS[dtype.name]
    flat, numbers = flat.view(real), direct.view(real)
    if bound is None:
        yield from _sum(flat, numbers, group)
        if group.identical_sums and array.dtype.isnative and signature is not None:
            if len(_known_sums) >= _MAX_KNOWN_SUMS:
                _known_sums.clear()
            _known_sums[array.dtype, array.shape] = _KnownSum(signature, real, group)
    else:
        yield from _bounded(flat, numbers, bound, relative, op, group)
    if not result.flags.c_contiguous:
        result[...] = direct.reshape(result.shape)
    return result


class _KnownSum:
    """A sum of arrays on which all ranks have agreed; to sum the next ones they send the same digest."""

    def __init__(self, signature: Signature, real: str, group: Group) -> None:
        self.group = group
        self._report = report_of(signature, None)
        self._digests = digest_round(self._report, False, group)
        self._real = np.dtype(real)

    def takes(self, array: Any, out: Any) -> bool:
        """Return whether neither array has to be copied or refused."""
        if isinstance(array, np.ndarray) and (type(array) is not np.ndarray or not array.flags.c_contiguous):
            return False
        return out is None or (
            type(out) is np.ndarray and out.flags.carray and (out.dtype, out.shape) == (array.dtype, array.shape)
            and not np.may_share_memory(array, out)
        )  # fmt: skip

    def rounds(self, array: Any, out: NDArray[Any] | None) -> Rounds[NDArray[Any]]:
        """Sum arrays. As rounds."""
        yield from compare(self._report, self._digests, self.group, "allreduce")
        result = np.empty(array.shape, array.dtype) if out is None else out
        send, recv = array.reshape(-1).view(self._real), result.reshape(-1).view(self._real)
        yield Round("allreduce", (send.size,), self._real, send=send, recv=recv)
        return result


_MAX_KNOWN_SUMS = 64
_known_sums: dict[tuple[np.dtype[Any], tuple[int, ...]], _KnownSum] = {}


def _sum(flat: NDArray[np.floating], out: NDArray[np.floating], group: Group) -> Rounds[None]:
    if group.identical_sums:
        send = flat.copy() if np.may_share_memory(flat, out) else flat  # on one rank perhaps, so not in place
        yield Round("allreduce", (flat.size,), flat.dtype, send=send, recv=out)
        return
    rows = yield from gather_rows(flat, group)
    np.copyto(out, rows[0])
    with np.errstate(over="ignore", invalid="ignore"):
        for row in rows[1:]:
            np.add(out, row, out=out)


def _bounded(
    flat: NDArray[np.floating], out: NDArray[np.floating], bound: float, relative: bool, op: str, group: Group
) -> Rounds[None]:
    if relative:
        ranges = (yield from gather_rows(np.float64(_range_of(flat)), group)).ravel()
        bound = _absolute(bound, float(ranges.sum() / (1 if op == "sum" else group.size)), _MIN_ERROR[flat.dtype.name])
    yield from bounded_sum(flat, out, grid_of(bound, op, flat.dtype, group.size), group)


def _range_of(array: NDArray[np.floating]) -> float:
    if not array.size:
        return 0.0
    low, high = float(array.min()), float(array.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        return _range_of(array[np.isfinite(array)])
    return high - low


def _absolute(share: float, whole: float, least: float) -> float:
    """Return a share of a range as a bound; where all is constant, the least one."""
    bound = share * whole
    if 0 < bound < least or (whole > 0 and bound == 0):
        raise ConfigurationError(
            f"allreduce: error times the range of the arrays must be at least {least:g}, got {share:g} x {whole:g}; "
            "multiply the array by a power of two first"
        )
    return min(max(bound, least), _MAX_ERROR)


def _check_bound(array: Any, compressor: Any, error: Any, op: str, relative: bool) -> float | None:
    check_choice("allreduce", "op", op, ("mean", "sum"))
    if error is None and (op == "mean" or relative):
        raise ConfigurationError("allreduce: out and relative need error=, the bound of the result, got None")
    given = "op='sum'" if error is None else "error="
    if compressor is not None:
        action = "adds arrays without a code" if error is None else "chooses its own code"
        raise ConfigurationError(f"allreduce: {given} {action}, got compressor {compressor!r}; pass one only")
    if not isinstance(array, np.ndarray | np.generic):
        raise ArrayTypeError(f"allreduce: {given} needs a NumPy array, got {type(array).__name__}; use numpy.asarray")
    check_not_masked("allreduce: the array", array)
    if array.dtype.name not in _REALS:
        raise ArrayTypeError(f"allreduce: {given} needs one of {', '.join(_REALS)}, got {array.dtype}; cast it first")
    if error is None:
        return None
    least, most = (_MIN_RELATIVE_ERROR, 1.0) if relative else (_MIN_ERROR[_REALS[array.dtype.name]], _MAX_ERROR)
    return check_range("allreduce", "error", error, least, most)


def _check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    if isinstance(out, np.ndarray) and out.flags.writeable and (out.dtype, out.shape) == (dtype, shape):
        return out
    got = type(out).__name__
    if isinstance(out, np.ndarray):
        got = f"{'one' if out.flags.writeable else 'a read-only one'} of {out.dtype} and shape {out.shape}"
    raise ArrayTypeError(f"allreduce: out must be a writable NumPy array of {dtype} and shape {shape}, got {got}")
