"""What stands in for a device complains where a device would misbehave in silence."""

import numpy as np
import pytest
from device import emulator

SOURCE = """
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
typedef long long i64;
KERNEL outside(int* array, i64 size) { array[size] = 1; }
KERNEL alone(int* array) {
  if (threadIdx.x < 40) __syncthreads();
}
KERNEL branches(int* array) {
  if (threadIdx.x % 2) __ballot_sync(0xffffffffu, 1); else __shfl_sync(0xffffffffu, 1, 0);
}
KERNEL shuffles(int* array) {
  if (threadIdx.x % 2) __shfl_xor_sync(0xffffffffu, 1, 1); else __shfl_sync(0xffffffffu, 1, 0);
}
KERNEL distances(int* array) {
  __shfl_up_sync(0xffffffffu, 1, threadIdx.x % 2 + 1);
}
KERNEL widths(int* array) {
  if (threadIdx.x % 2) __shfl_sync(0xffffffffu, 1, 0); else __shfl_sync(0xffffffffu, 1.0, 0);
}
KERNEL race(int* array) {
  __shared__ int last;
  last = threadIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) array[blockIdx.x] = last;
}
KERNEL increments(int* array) { array[0] = array[0] + 1; }
KERNEL increments_of_blocks(int* array) {
  if (threadIdx.x == 0) array[0] = array[0] + 1;
}
KERNEL half_atomic(int* array) {
  if (threadIdx.x < 32) atomicAdd(array, 1); else array[0] = array[0] + 1;
}
KERNEL no_barrier(int* array) {
  __shared__ int parts[64];
  parts[threadIdx.x] = threadIdx.x;
  array[blockIdx.x * 64 + threadIdx.x] = parts[threadIdx.x ^ 32];
}
KERNEL no_second_barrier(int* array) {
  __shared__ int parts[64];
  for (int turn = 0; turn < 2; ++turn) {
    parts[threadIdx.x] = threadIdx.x + turn;
    __syncthreads();
    array[blockIdx.x * 64 + threadIdx.x] = parts[threadIdx.x ^ 32];
  }
}
KERNEL in_order(int* array) {
  __shared__ int parts[64], any;
  __shared__ char bytes[64];
  if (threadIdx.x == 0) any = 0;
  __syncthreads();
  for (int turn = 0; turn < 2; ++turn) {
    parts[threadIdx.x] = threadIdx.x;
    bytes[threadIdx.x] = 1;
    __ballot_sync(0xffffffffu, 1);
    int near = parts[threadIdx.x ^ 1];
    __syncthreads();
    array[blockIdx.x * 64 + threadIdx.x] = parts[threadIdx.x ^ 32] + near + bytes[threadIdx.x ^ 33];
    if (threadIdx.x % 2) any = 1;  // the same by all of them
    __syncthreads();
  }
}
KERNEL left_over(int* array) {
  __shared__ int parts[64];
  if (blockIdx.x == 3) parts[threadIdx.x] = 7;
  __syncthreads();
  array[blockIdx.x * 64 + threadIdx.x] = parts[threadIdx.x];
}
KERNEL past_end(int* array, i64 size) {
  if (threadIdx.x == 0) array[0] = array[size];
}
KERNEL between(int* array) { ((double*)(array + 1))[threadIdx.x] = 1; }
KERNEL lanes(int* array, double factor) {
  int lane = threadIdx.x % 32;
  int up = __shfl_up_sync(0xffffffffu, lane, 3), other = __shfl_xor_sync(0xffffffffu, lane, 16);
  unsigned votes = __ballot_sync(0xffffffffu, lane % 3 == 0);
  array[threadIdx.x] = up + 100 * other + 10000 * __popc(votes) + (int)factor;
}
"""


@pytest.fixture
def launch(place):
    if not place.emulated:
        pytest.skip("about the emulation only")
    module = emulator.RawModule(SOURCE)
    return lambda name, blocks, *arguments: module.get_function(name)((blocks,), (64,), arguments)


DISORDER = "is not ordered with another thread's"
MEETING = "threads meet in different functions"
FAULTS = [  # kernel, length of the array, further arguments, and the message, whatever the order of threads
    ("outside", 5, [5], "outside: block 0, thread [0-9]+: a write outside the arrays"),
    *(("past_end", 5, [index], "past_end: block 0, thread 0: a read outside the arrays") for index in (-1, 5)),
    ("between", 256, [], "an access that is not aligned"),
    *((name, 512, [], f"{name}: .* {DISORDER}") for name in (
        "race", "increments", "increments_of_blocks", "half_atomic", "no_second_barrier",
    )),
    ("no_barrier", 512, [], f"({DISORDER}|is read before it is written)"),
    ("left_over", 512, [], "left_over: .*: shared memory is read before it is written"),
    ("alone", 1, [], "alone: block [0-7]: 40 threads wait for others that do not come"),
    *((name, 1, [], MEETING) for name in ("branches", "shuffles", "distances", "widths")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "size", "more", "message"), FAULTS)
def test_faults_fail(launch, place, name, size, more, message):
    for _ in range(8):
        with pytest.raises(RuntimeError, match=message):
            launch(name, 8 if size == 512 else 1, place.zeros(size, np.int32), *more)


def test_a_part_of_an_array_ends_where_the_argument_does(launch, place):
    array = place.zeros(9, np.int32)
    launch("past_end", 1, array, 5)
    with pytest.raises(RuntimeError, match="a read outside the arrays"):
        launch("past_end", 1, array[:5], 5)


def test_what_is_in_order_runs(launch, place):
    array = place.zeros(512, np.int32)
    for _ in range(8):
        launch("in_order", 8, array)
    thread = np.arange(512) % 64
    np.testing.assert_array_equal(array.get(), (thread ^ 32) + (thread ^ 1) + 1)
    launch("lanes", 1, array[:64], 0.0)
    lane = np.arange(64) % 32
    expected = np.where(lane < 3, lane, lane - 3) + 100 * (lane ^ 16) + 10000 * 11
    np.testing.assert_array_equal(array[:64].get(), expected)


def test_waiting_for_the_device(place):
    if not place.emulated:
        pytest.skip("about the emulation only")
    array = place.zeros(3, np.int64)
    for wait in (lambda: array.get(), lambda: int(array[0]), lambda: bool(array[0]), lambda: array[0].item()):
        wait()
        with place.quiet(), pytest.raises(RuntimeError, match="the host waits"):
            wait()


def test_kernels_run_on_a_device_too():
    """Skipped where every test of this folder runs in the emulation alone."""
    pytest.importorskip("cupy", reason="CuPy is not installed: kernels run emulated only", exc_type=ImportError)
