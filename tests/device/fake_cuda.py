"""A GPU that is none: the module cupy over memory of the host, with the streams of `device.fake_driver`.

Arrays are opaque, as those of CuPy are: NumPy gets at none of them but by what CuPy offers it, and mixing them with
arrays of the host fails. Kernels are those of the host (`HostKernels`), or those of CUDA in an emulation (see
`device.emulator`).
"""

import contextlib
import functools
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import numpy as np
from device import emulator
from device.fake_driver import FROM_HOST, RUBBISH, TO_HOST, Driver
from mpicomp.kernels import cpu, gpu
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpicomp import kernels
from mpicomp.gpu import cuda

LEGACY = 1

_KNOWN = (
    "concatenate copyto searchsorted dot flatnonzero where cumsum diff stack nonzero einsum may_share_memory "
    "shares_memory matmul tensordot sum max min any all argsort sort zeros_like empty_like ones_like qr norm svd clip "
    "round repeat split reshape ravel transpose count_nonzero amax amin mean outer vdot take unique isin append"
)
"""What NumPy's functions of these names do with arrays of CuPy."""


class ndarray(NDArrayOperatorsMixin):  # noqa: N801 (CuPy's name)
    """An array of the device."""

    __module__ = "cupy"
    cupy: "Cupy"  # set by it

    def __init__(self, host, base=None, memory=None):
        self._host = host
        self.base = base
        self._memory = memory if base is None else base._memory
        if base is None:
            self.device = _Device(self.cupy.driver.use())
            self.cupy.driver.place(host, self.device.id)
        else:
            self.device = base.device

    data = property(lambda self: SimpleNamespace(ptr=self._host.ctypes.data))
    T = property(lambda self: self.transpose())

    def _view(self, host):
        return ndarray(host, self if self.base is None else self.base)

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    @property
    def __cuda_array_interface__(self):
        interface = {key: self._host.__array_interface__[key] for key in ("shape", "typestr")}
        interface |= {"data": (self._host.ctypes.data if self.size else 0, False), "strides": self._host.strides}
        stream = {"stream": self.cupy.stream_in_use()} if self.cupy.version >= 3 else {}
        return interface | stream | {"version": self.cupy.version}

    # What torch is allowed: memory of the host, to which it writes at once.

    def __dlpack__(self, **settings):
        return self._host.__dlpack__(**settings)

    def __dlpack_device__(self):
        return self._host.__dlpack_device__()

    # What NumPy is allowed.

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **settings):
        if method != "__call__" or set(settings) - {"dtype", "casting"}:
            return NotImplemented
        outs = () if out is None else out
        return self.cupy.compute(lambda *given, **how: ufunc(*given, **how, **settings), inputs, outs)

    def __array_function__(self, function, types, args, kwargs):
        if function.__name__ not in _KNOWN.split():
            raise TypeError(f"CuPy has no {function.__name__}")
        if function.__name__ in ("may_share_memory", "shares_memory"):
            return function(*(_host_of(value) for value in args))
        if function.__name__ == "split":
            return [args[0]._view(part) for part in np.split(args[0]._host, *args[1:], **kwargs)]
        if function.__name__ == "copyto":
            out, source, *rest = args
            self.cupy.change(out, lambda host: np.copyto(host, _host_of(source), *rest, **kwargs), source)
            return None
        out = kwargs.pop("out", None)
        hosts = _strictly((args, kwargs))
        return self.cupy.compute(
            lambda *given, out=None: function(*hosts[0], **hosts[1], **({} if out is None else {"out": out[0]})),
            (),
            () if out is None else (out,),
        )

    def __getitem__(self, key):
        if _fancy(key):
            return self.cupy.compute(_taken, (self, *_tuple(key)))
        found = self._host[key]
        if not isinstance(found, np.ndarray):  # a number: a 0-d array that shares memory
            found = self._host[(*key, ...) if isinstance(key, tuple) else (key, ...)]
        return self._view(found)

    def __setitem__(self, key, value):
        if isinstance(value, np.ndarray | list | tuple):
            raise TypeError(f"cannot put a {type(value).__name__} of the host into an array of the device")
        keys = key
        if _fancy(key):
            hosts = tuple(_host_of(part) for part in _tuple(key))
            keys = hosts if len(hosts) > 1 else hosts[0]
        self.cupy.change(self, lambda host: host.__setitem__(keys, _host_of(value)), value)

    def __len__(self):
        return len(self._host)

    def __iter__(self):
        return (self[place] for place in range(len(self)))

    def view(self, dtype=None):
        return self._view(self._host.view(dtype))

    def reshape(self, *shape):
        return self._view(self._host.reshape(*shape))

    def ravel(self):
        return self._view(self._host.reshape(-1))

    def transpose(self, *axes):
        return self._view(self._host.transpose(*axes))

    def astype(self, dtype, copy=True):
        if self.dtype == dtype and not copy:
            return self
        return self.cupy.compute(lambda host: host.astype(dtype), (self,))

    def copy(self):
        return self.cupy.compute(np.copy, (self,))

    def set(self, values):
        assert values.dtype == self.dtype
        self.cupy.driver.from_host_bytes += values.nbytes
        values = values.copy()
        self.cupy.put(lambda: np.copyto(self._host, values))

    def fill(self, value):
        self.cupy.change(self, lambda host: host.fill(_host_of(value)), value)

    def partition(self, place):
        self.cupy.change(self, lambda host: host.partition(place))

    def dot(self, other):
        return np.dot(self, other)

    # What waits for the device.

    def get(self, stream=None, order="C", out=None):
        return self.cupy.read(self)

    def item(self):
        return self.cupy.read(self).item()

    def tolist(self):
        return self.cupy.read(self).tolist()

    def __index__(self):
        return self.item().__index__()


def _reduce(name):
    def reduced(self, *args, **settings):
        return self.cupy.compute(lambda host: getattr(host, name)(*args, **settings), (self,))

    return reduced


for _kind in (int, float, bool):
    setattr(ndarray, f"__{_kind.__name__}__", lambda self, kind=_kind: kind(self.item()))
for _name in ("any", "all", "sum", "max", "min"):
    setattr(ndarray, _name, _reduce(_name))
for _name in ("dtype", "size", "shape", "ndim", "nbytes", "itemsize", "strides", "flags"):
    setattr(ndarray, _name, property(lambda self, name=_name: getattr(self._host, name)))


def _tuple(key):
    return key if isinstance(key, tuple) else (key,)


def _fancy(key):
    if any(isinstance(part, np.ndarray | list) for part in _tuple(key)):
        raise TypeError("an array of the device is not indexed by one of the host")
    return any(isinstance(part, ndarray) and part.ndim > 0 for part in _tuple(key))


def _taken(host, *keys):
    return host[keys if len(keys) > 1 else keys[0]]


def _places(key):
    return np.zeros_like(key) if isinstance(key, np.ndarray) and key.dtype != bool else key


def _host_of(value):
    return value._host if isinstance(value, ndarray) else value


def _strictly(value):
    """Return the memory of arrays of the device; arrays of the host are refused."""
    if isinstance(value, ndarray):
        return value._host
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, tuple | list):
        return type(value)(_strictly(part) for part in value)
    if isinstance(value, dict):
        return {key: _strictly(part) for key, part in value.items()}
    return value


class _Device:
    """A device, compared by number, and current inside ``with``."""

    def __init__(self, number):
        self.id = number

    def __eq__(self, other):
        return self.id == other.id

    def __hash__(self):
        return self.id

    def use(self):
        ndarray.cupy.driver.use(self.id)

    def __enter__(self):
        self.before = ndarray.cupy.driver.current()
        self.use()
        return self

    def __exit__(self, *exception):
        ndarray.cupy.driver.use(self.before)  # as CuPy does, even where that makes a context


class Cupy(ModuleType):
    """The module."""

    version = 3  # of the interface of arrays
    malloc = None  # the allocator in use, if it is not CuPy's

    def __init__(self, driver, joins=False):
        super().__init__("cupy")
        self.driver, self.joins = driver, joins
        self._current = threading.local()
        self.reads = 0
        self.launches = []
        outer = self

        class Stream:
            def __init__(self, non_blocking=False):
                assert non_blocking, "it would wait for the default stream"
                self.ptr = driver.stream()

            def __enter__(self):
                assert driver.devices[self.ptr] == driver.current(), "the stream is another device's"
                outer.stack().append(self.ptr)
                return self

            def __exit__(self, *exception):
                outer.stack().pop()

            def synchronize(self):
                driver.finish(self.ptr)

            def wait_event(self, event):
                driver.wait_event(self.ptr, event.ptr)

        class Event:
            def __init__(self, disable_timing=False):
                self.ptr = driver.event()

            def record(self, stream=None):
                self.seconds = time.perf_counter()
                driver.record(self.ptr, outer.stream_in_use() if stream is None else stream.ptr)

            def synchronize(self):
                driver.wait(self.ptr)

        self.ndarray = ndarray
        self.cuda = SimpleNamespace(
            Device=_Device,
            Event=Event,
            get_elapsed_time=lambda start, stop: 1e3 * (stop.seconds - start.seconds),
            Stream=Stream,
            UnownedMemory=lambda address, nbytes, owner, device: owner,
            MemoryPointer=lambda memory, offset: memory,
            using_allocator=self.using_allocator,
            driver=SimpleNamespace(ctxGetCurrent=lambda: driver.context()),
            get_current_stream=lambda: SimpleNamespace(ptr=self.stream_in_use()),
            runtime=SimpleNamespace(
                getDevice=driver.current,
                getDeviceCount=lambda: 2,
                is_hip=False,
                getDeviceProperties=lambda number: {"name": b"Stand-in"},
                setDevice=driver.use,
                eventRecord=lambda event, stream: driver.record(event, stream),
                memcpyAsync=driver.copy,
                memcpyHostToDevice=FROM_HOST,
                memcpyDeviceToHost=TO_HOST,
                pointerGetAttributes=lambda address: SimpleNamespace(device=driver.device_of(address)),
                streamWaitEvent=driver.wait_event,
            ),
        )

    @contextlib.contextmanager
    def using_allocator(self, malloc):
        before, self.malloc = self.malloc, malloc
        try:
            yield
        finally:
            self.malloc = before

    def stack(self):
        if not hasattr(self._current, "stack"):
            self._current.stack = [LEGACY]
        return self._current.stack

    def stream_in_use(self):
        return self.stack()[-1]

    @contextlib.contextmanager
    def stream(self, number):
        self.stack().append(number)
        try:
            yield
        finally:
            self.stack().pop()

    def put(self, work):
        self.driver.put(self.stream_in_use(), work)

    def empty(self, shape, dtype=np.float64):
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        memory = emulator.Memory(nbytes)
        if self.malloc is not None:
            memory.taken = self.malloc(nbytes)
        return ndarray(memory.inside.view(dtype).reshape(shape), memory=memory)

    def RawModule(self, code, options=()):  # noqa: N802 (CuPy's name)
        """Return a source's kernels, which run when the stream that they were put into has come so far."""
        module = emulator.RawModule(code, options, self.joins)

        def get_function(name):
            kernel = module.get_function(name)

            def launch(grid, block, arguments):
                self.launches.append(name)
                self.put(lambda: kernel(grid, block, arguments))

            return launch

        return SimpleNamespace(compile=lambda: None, get_function=get_function)

    def zeros(self, shape, dtype=np.float64):
        made = self.empty(shape, dtype)
        made.fill(0)
        return made

    def asarray(self, values, dtype=None):
        if isinstance(values, ndarray):
            return values
        values = np.array(values, dtype)
        self.driver.from_host_bytes += values.nbytes
        made = self.empty(values.shape, values.dtype)
        self.put(lambda: np.copyto(made._host, values))
        return made

    array = asarray

    def compute(self, work, inputs, outs=()):
        """Put work into the current stream; what it makes is there when the stream has come so far."""
        hosts = [_strictly(value) for value in inputs]
        into = tuple(_host_of(out) for out in outs)
        assert all(isinstance(out, ndarray) for out in outs), "the result goes to an array of the host"

        def done():
            with np.errstate(all="ignore"):
                return work(*hosts, out=into) if into else work(*hosts)

        if into:
            self.put(done)
            return outs[0] if len(outs) == 1 else outs
        if self.driver.schedule == "eager":
            self.driver.finish(self.stream_in_use())
            return _wrapped(done())
        # Its shape and dtype are known now, its values later, and so are the places that elements are taken from.
        kind = _taken(hosts[0], *map(_places, hosts[1:])) if work is _taken else done()
        made = _wrapped(kind)
        for one in made if isinstance(made, tuple | list) else (made,):
            one._host.reshape(-1).view(np.uint8)[:] = RUBBISH
        self.put(lambda: _copy(done(), made))
        return made

    def change(self, array, work, *inputs):
        assert isinstance(array, ndarray), "an array of the host takes values of the device"
        for value in inputs:
            _strictly(value)
        with np.errstate(all="ignore"):
            self.put(lambda: work(array._host))

    def read(self, array):
        """Wait, and copy to the host by the way that is not counted as a batch."""
        emulator.synchronise()
        self.reads += 1
        self.driver.to_host_bytes += array.nbytes
        self.driver.finish(self.stream_in_use() or LEGACY)
        return array._host.copy()


def _wrapped(value):
    if isinstance(value, tuple | list):
        return type(value)(*map(_wrapped, value)) if hasattr(value, "_fields") else tuple(map(_wrapped, value))
    return ndarray(np.array(value) if not isinstance(value, np.ndarray) else value)


def _copy(values, made):
    for value, one in zip(values, made, strict=True) if isinstance(made, tuple) else [(values, made)]:
        one._host[...] = value


class HostKernels:
    """The host's kernels for arrays of the device: numbers come back as 0-d arrays, which are waited for."""

    def __init__(self, cupy):
        self._cupy = cupy

    def __getattr__(self, name):
        found = getattr(cpu, name)
        if not callable(found) or isinstance(found, type):
            return found

        return functools.partial(self.call, found)

    def compile_ahead(self, sources, dtype):
        """Do nothing: the host's kernels are no sources."""

    def call(self, kernel, *args, **kwargs):
        args, kwargs = _strictly(args), _strictly(kwargs)
        self._cupy.driver.finish(self._cupy.stream_in_use())
        args = tuple(_plain(value) for value in args)
        made = kernel(*args, **{key: _plain(value) for key, value in kwargs.items()})
        return None if made is None else _result(made)


def _plain(value):
    """Return a number for a 0-d array of the device, as kernels read them there."""
    return value[()].item() if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _result(made):
    if isinstance(made, tuple):
        parts = [_result(part) for part in made]
        return type(made)(*parts) if hasattr(made, "_fields") else tuple(parts)
    return ndarray(np.array(made))


emulating = functools.cache(lambda joins: Cupy(Driver(), joins))
"""A module for tests of kernels, whose sources are then compiled once."""


def install(monkeypatch, schedule="eager", emulated=False, guarded=False, cupy=None):
    """Replace CuPy and the driver, with the kernels of the host or emulated ones; return the module.

    With ``guarded``, other code that touches its memory dies, see `device.guarded`.
    """
    if guarded:
        from device import guarded as guards  # it changes this module

        guards.install(monkeypatch)
    ndarray.cupy = cupy = cupy or Cupy(Driver(schedule))
    driver = cupy.driver
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr("mpicomp.gpu.cuda._in_use", [])  # threads that later tests start have no such GPU
    one = getattr(cuda.cuda_device, "__wrapped__", None)
    monkeypatch.setattr(cuda, "cuda_device", cuda.CudaDevice if one is None else functools.cache(one))
    monkeypatch.setitem(sys.modules, "cupyx", SimpleNamespace(empty_pinned=lambda size, dtype: driver.pinned(size)))
    monkeypatch.setitem(kernels._modules, ndarray, gpu if emulated else HostKernels(cupy))
    return cupy
