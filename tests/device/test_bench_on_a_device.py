"""Benchmarks and measured kernels with arrays on a device: in its stream, to its end, and not mixed with the host's."""

import json
import sys

import numpy as np
import pytest
from device import fake_cuda
from marks import once
from mpicomp.bench import devices
from mpicomp.bench.measure.feedback import Gradients
from networks import Link
from schemes import REPRESENTED
from worlds import Ranks

import mpicomp
from mpicomp.cli import main
from mpicomp.collectives import bind
from mpicomp.cost import CostModel, kernel_costs
from mpicomp.errors import ConfigurationError, LaunchError
from mpicomp.gpu import HOST
from mpicomp.gpu.cuda import CudaDevice
from mpicomp.mpi import LocalWorld
from mpicomp.policies import Shape

TOPK = mpicomp.TopK(ratio=0.1)
SUFFIX = " on cuda"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(kernel_costs, "_DEVICE_NUMELS", (1 << 8, 1 << 10))


@pytest.mark.parametrize(("compressor", "collective"), once(REPRESENTED), ids=str)
def test_own_work_is_measured_on_the_device(compressor, collective, eager):
    """To its end: the clock is read when the device has done all that it was given."""
    device, readings = CudaDevice(0), []

    def clock():
        assert not eager.driver.streams[device.stream.ptr]
        readings.append(None)
        return float(len(readings))

    numbers = kernel_costs.measure_kernel(bind(compressor, collective), None, compressor.contractive, clock, device)
    assert all(number >= 0 and np.isfinite(number) for number in numbers)
    assert len(readings) == 2 * 2 * (kernel_costs._WARMUP_STEPS + kernel_costs._TIMED_STEPS)


def test_where_a_bucket_lives_is_no_part_of_what_is_compared(eager):
    shape = ("w",), (4,), ((4,),), np.dtype(np.float32)
    assert Shape(*shape) == Shape(*shape, CudaDevice(0))
    assert hash(Shape(*shape)) == hash(Shape(*shape, CudaDevice(0)))


def costs(brought, compressor=TOPK, given=None):
    """Give the cost model of every rank after some steps, and the plans that ran; ``brought`` has one callable each."""
    size = len(brought)
    ranks = Ranks(size, compressor, network=Link(1e-5, 1e9), cost=given)
    ran = []
    for step in range(4):
        random = np.random.default_rng(step)
        ranks.reduce([{"w": bring(random.laplace(size=3000).astype(np.float32))} for bring in brought])
        ran.append([reducer.last_step.buckets[0].collective for reducer in ranks.reducers])
    assert all(len(set(names)) == 1 for names in ran)
    return [reducer.cost for reducer in ranks.reducers]


def on_a_device(known):
    """Return the names of what was measured on a device, without the ending that tells it."""
    return {key.removesuffix(SUFFIX) for key in known if key.endswith(SUFFIX)}


@pytest.mark.parametrize("first", ["both", "host", "device"])
def test_figures_of_a_device_have_names_of_their_own(first, eager):
    """Ranks in different places take the first one's word for where they are."""
    places = {"both": [eager.asarray] * 2, "host": [np.asarray, eager.asarray], "device": [eager.asarray, np.asarray]}
    one, other = costs(places[first])
    assert one.to_json() == other.to_json()
    assert CostModel.from_json(one.to_json()).to_json() == one.to_json()
    for known in (one.kernels, one.kernel_corrections, one.speed_corrections):
        assert len(on_a_device(known)) == (0 if first == "host" else len(known))
    assert one.kernels
    assert not on_a_device(one.round_corrections)


def test_costs_saved_on_the_host_are_not_used_for_a_device(eager):
    saved = CostModel.from_json(costs([np.asarray] * 2)[0].to_json())
    before = dict(saved.kernels)
    found = costs([eager.asarray] * 2, given=saved)[0].kernels
    assert {key: cost for key, cost in found.items() if not key.endswith(SUFFIX)} == before
    assert on_a_device(found) == set(before)


def test_gradients_can_be_used_in_any_stream(cupy):
    there, here = Gradients(500, seed=3, device=CudaDevice(0)), Gradients(500, seed=3)
    for _ in range(3):
        np.testing.assert_array_equal(there.fresh().get(), here.fresh())


@pytest.fixture
def one_rank(monkeypatch):
    """Let commands run as a job of one rank, without MPI, that has found a GPU."""
    monkeypatch.setattr("mpicomp.mpi.comm.MPITransport", lambda: LocalWorld(1).transports[0])
    monkeypatch.setattr(devices, "find", lambda: 0)


@pytest.mark.slow
def test_collectives_are_timed_on_the_device(cupy, one_rank, monkeypatch, tmp_path, capsys):
    path = tmp_path / "rows.json"
    words = ["--device", "gpu", "--numel", "500", "--ratio", "0.1", "--collective", "allgather", "--limit", "0.02"]
    assert main(["bench", "collectives", *words, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["environment"]["device"] == "Stand-in"
    for row in written["rows"]:
        assert (row["device"], row["route"], row["correct"]) == ("gpu", "staged", True)
        assert row["predicted_s"] is None or row["predicted_s"] > 0
    assert "# gradients are in the memory of GPUs; rank 0 has one Stand-in" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["train"], ["bench", "training", "--blocks", "1", "--warm-up", "1"]], ids=str)
def test_the_commands_that_train_take_torchs_device(words, one_rank, monkeypatch):
    """Its memory is the host's here: torch has no stand-in."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    asked = []
    monkeypatch.setattr(devices, "torch_device", lambda *given: asked.append(given) or torch.device("cpu", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    more = ["--exchange", "none,topk"] if "training" in words else ["--compressor", "topk", "--no-verdict"]
    assert main([*words, "--task", "digits", "--steps", "2", *more, "--device", "gpu"]) == 0
    assert [number for _, number in asked] == [0]


NO_GPU = LaunchError("gpu: there is none on n1; ask the job for one")
MISSING = [
    (devices.device_on, "bench x", 0, r"^bench x: --device gpu needs CuPy \(.*\); pip install 'mpicomp"),
    (devices.device_on, "bench x", NO_GPU, r"^bench x: --device gpu: gpu: there is none on n1; ask .*; or use"),
    (devices.torch_device, "train", 0, r"^train: --device gpu needs a PyTorch with CUDA, and torch .* finds"),
]


@pytest.mark.parametrize(("find", "command", "number", "message"), MISSING)
def test_what_is_missing_is_said_in_a_line(find, command, number, message, eager, monkeypatch):
    if number == 0:
        monkeypatch.setitem(sys.modules, "cupy", None)
        monkeypatch.setattr(pytest.importorskip("torch").cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match=message):
        find(command, number)


def test_the_gpu_of_a_rank_is_made_current(eager, monkeypatch):
    used = []
    monkeypatch.setattr(fake_cuda._Device, "use", lambda self: used.append(self.id))
    assert devices.device_on("bench x", 0) is not HOST
    assert used == [0]
