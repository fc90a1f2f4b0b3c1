"""What stands in for a device complains where a device would misbehave in silence."""

import numpy as np
import pytest
from gpu import standin

SOURCE = """
typedef long long i64;
extern "C" __global__ void __launch_bounds__(THREADS) outside(int* array, i64 size) { array[size] = 1; }
extern "C" __global__ void __launch_bounds__(THREADS) alone(int* array) {
  if (threadIdx.x < 40) __syncthreads();
}
extern "C" __global__ void __launch_bounds__(THREADS) apart(int* array) {
  if (threadIdx.x % 2) __ballot_sync(0xffffffffu, 1); else __shfl_sync(0xffffffffu, 1, 0);
}
extern "C" __global__ void __launch_bounds__(THREADS) race(int* array) {
  __shared__ int last;
  last = threadIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) array[blockIdx.x] = last;
}
extern "C" __global__ void __launch_bounds__(THREADS) order(int* array) {
  if (threadIdx.x == 0) array[1 + atomicAdd(array, 1)] = blockIdx.x;
}
extern "C" __global__ void __launch_bounds__(THREADS) lanes(int* array, double factor) {
  int lane = threadIdx.x % 32;
  int up = __shfl_up_sync(0xffffffffu, lane, 3), other = __shfl_xor_sync(0xffffffffu, lane, 16);
  unsigned votes = __ballot_sync(0xffffffffu, lane % 3 == 0);
  array[threadIdx.x] = up + 100 * other + 10000 * __popc(votes) + (int)factor;
}
"""


@pytest.fixture
def kernel(place):
    if not place.emulated:
        pytest.skip("about the emulation only")
    module = standin.RawModule(SOURCE)

    def launch(name, blocks, *arguments):
        module.get_function(name)((blocks,), (64,), arguments)

    return launch


def test_collective_functions(kernel):
    array = standin.zeros(64, np.int32)
    kernel("lanes", 1, array, 0.0)
    lane = np.arange(64) % 32
    expected = np.where(lane < 3, lane, lane - 3) + 100 * (lane ^ 16) + 10000 * 11
    np.testing.assert_array_equal(array.get(), expected)


def test_writing_outside_an_array(kernel):
    with pytest.raises(RuntimeError, match="wrote outside an array"):
        kernel("outside", 1, standin.zeros(5, np.int32), 5)


def test_threads_that_do_not_come(kernel):
    with pytest.raises(RuntimeError, match="alone: block 0: 40 threads wait for others that do not come"):
        kernel("alone", 1, standin.zeros(1, np.int32))


def test_threads_that_meet_in_different_functions(kernel):
    with pytest.raises(RuntimeError, match="threads meet in different functions"):
        kernel("apart", 1, standin.zeros(1, np.int32))


@pytest.mark.parametrize("name", ["race", "order"])
def test_what_depends_on_the_order_differs_from_call_to_call(kernel, name):
    seen = set()
    for _ in range(8):
        array = standin.zeros(9, np.int32)
        kernel(name, 8, array)
        seen.add(tuple(array.get()))
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("outside", ("array", 5.0)),
        ("outside", ("array", 5, 5)),
        ("outside", ("array", np.int32(5))),
        ("outside", (7, 5)),
        ("lanes", ("array", 1)),
    ],
)
def test_arguments_that_do_not_fit_the_parameters(kernel, name, arguments):
    given = [standin.zeros(9, np.int32) if argument == "array" else argument for argument in arguments]
    with pytest.raises(AssertionError, match=name):
        kernel(name, 1, *given)


def test_waiting_for_the_device(place):
    if not place.emulated:
        pytest.skip("about the emulation only")
    array = standin.zeros(3, np.int64)
    for wait in (lambda: array.get(), lambda: int(array[0]), lambda: bool(array[0]), lambda: array[0].item()):
        wait()
        with standin.no_synchronisation(), pytest.raises(RuntimeError, match="the host waits"):
            wait()


def test_memory_is_not_zero_to_begin_with():
    assert standin.empty(3, np.uint32).get().tolist() == [0xC9C9C9C9] * 3


def test_kernels_run_on_a_device_too():
    """Skipped where every test of this folder runs in the emulation alone."""
    pytest.importorskip("cupy", reason="CuPy is not installed: kernels run emulated only", exc_type=ImportError)
