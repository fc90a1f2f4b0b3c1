"""The rows of ``mpicomp bench kernels --device gpu``: in an emulation, and on a device where there is one."""

import json
import platform
import shutil
import sys
import time
import types

import numpy as np
import pytest
from gpu import device, standin
from mpicomp.bench import kernels_gpu
from mpicomp.bench.kernels import Settings

from mpicomp.cli import main
from mpicomp.compressors import TopK, get_compressor
from mpicomp.places.cuda import CudaPlace

NUMEL = 3000


class Event:
    def record(self):
        self.seconds = time.perf_counter()

    def synchronize(self):
        pass


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Give the folder of emulated kernels, which take longer to compile than to run."""
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(params=["emulated", "device"])
def cupy(request, monkeypatch, built):
    """Put in place what stands for CuPy, with what the benchmark uses beyond the kernels."""
    if request.param == "device":
        cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            pytest.skip(f"no GPU: {error}")
        return cupy
    if shutil.which(standin.COMPILER) is None or platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the emulation needs g++ and x86-64")
    monkeypatch.setattr(standin, "folder", built)
    cupy = device.install(monkeypatch, emulated=True)
    cupy.__version__ = "0"
    cupy.cuda.runtime = types.SimpleNamespace(
        getDevice=lambda: 0, getDeviceCount=lambda: 1, getDeviceProperties=lambda number: {"name": b"Emulated"}
    )
    cupy.cuda.Event = Event
    cupy.cuda.get_elapsed_time = lambda start, stop: 1e3 * (stop.seconds - start.seconds)
    monkeypatch.setattr(device._Device, "use", lambda self: None, raising=False)
    monkeypatch.setattr(kernels_gpu, "_torch_sees_a_gpu", lambda: False)
    return cupy


@pytest.mark.slow
@pytest.mark.usefixtures("cupy")
def test_everything_has_its_rows():
    compressors = [TopK(ratio=0.1), get_compressor({"id": "sidco", "ratio": 0.1})]
    rows = kernels_gpu.measure(Settings(NUMEL, (0.1,), compressors, repeats=2))
    names = [row["name"] for row in rows if row["name"] != "torch.topk"]
    assert names == ["memcpy", "topk.compress", "sidco.compress", "spectrum", "spectrum.sampled", "decode"]
    for row in rows:
        assert row["copies"] == pytest.approx(row["median_s"] / rows[0]["median_s"])
        assert row["behind_copies"] == pytest.approx(row["behind_s"] / rows[0]["behind_s"])
        assert row["threads"] is None
        if row["name"].endswith(".compress"):
            assert row["ratio_reached"] == pytest.approx(0.1, rel=1e-9 if row["name"] == "topk.compress" else 0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("cupy")
def test_the_command(tmp_path):
    path = tmp_path / "out.json"
    words = ["bench", "kernels", "--device", "gpu", "--numel", "3000", "--ratio", "0.2", "--repeats", "2"]
    assert main([*words, "--compressor", "topk", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["environment"]["device"] != "cpu"
    assert written["environment"]["cupy"] is not None
    assert {row["name"] for row in written["rows"]} >= {"memcpy", "topk.compress", "decode"}


def test_nothing_is_lost_in_a_step(cupy):
    from mpicomp.bench.measure.gradients import Gradients

    place = CudaPlace(0)
    kernel = kernels_gpu.compress_kernel(TopK(ratio=0.1), Gradients(NUMEL, place=place))
    workspace = kernel.selecting.context.workspace
    with place.current():
        for _ in range(3):
            kernel.prepare()
            before = residual_of(kernel) + kernel.gradient.get()
            kernel.run()
            count = NUMEL // 10
            sent = np.zeros(NUMEL, np.float32)
            indices, values = (workspace.array(f"topk.{name}", count, kind) for name, kind in KINDS.items())
            sent[indices.get()] = values.get()
            np.testing.assert_array_equal(residual_of(kernel) + sent, before)


KINDS = {"indices": np.uint32, "values": np.float32}


def residual_of(kernel):
    [(_, residual)] = kernel.bucket.residuals()
    return residual.get()


@pytest.mark.usefixtures("cupy")
def test_a_step_waits_for_no_number():
    """What a reducer reads comes with the messages that it receives."""
    from mpicomp.bench.measure.gradients import Gradients

    place = CudaPlace(0)
    kernel = kernels_gpu.compress_kernel(TopK(ratio=0.1), Gradients(NUMEL, place=place))
    with place.current():
        kernel.run()
        before = place.reads, place.to_host_bytes
        kernel.prepare()
        kernel.run()
        assert (place.reads, place.to_host_bytes) == before


@pytest.mark.usefixtures("cupy")
def test_no_device(monkeypatch, capsys):
    def none():
        raise RuntimeError("cudaErrorNoDevice")

    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "getDeviceCount", none)
    assert main(["bench", "kernels", "--device", "gpu"]) == 2
    assert "--device gpu: cudaErrorNoDevice; use --device cpu" in capsys.readouterr().err
