"""The rows of ``mpicomp bench kernels --device gpu``: in an emulation, and on a device where there is one."""

import json
import platform
import shutil
import sys
import time
import types

import numpy as np
import pytest
from gpu import standin
from mpicomp.bench import kernels_gpu
from mpicomp.bench.kernels import Settings

from mpicomp.cli import main
from mpicomp.compressors import TopK, get_compressor, list_compressors

NUMEL = 3000


class Event:
    def record(self):
        self.seconds = time.perf_counter()

    def synchronize(self):
        pass


def copyto(out, source):
    out._host[:] = source._host


@pytest.fixture(params=["emulated", "device"])
def cupy(request, monkeypatch, tmp_path):
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
    monkeypatch.setattr(standin, "folder", tmp_path, raising=False)
    cupy = types.ModuleType("cupy")
    vars(cupy).update({name: value for name, value in vars(standin).items() if not name.startswith("__")})
    cupy.__version__ = "0"
    cupy.copyto = copyto
    runtime = types.SimpleNamespace(
        getDevice=lambda: 0, getDeviceCount=lambda: 1, getDeviceProperties=lambda device: {"name": b"Emulated"}
    )
    cupy.cuda = types.SimpleNamespace(
        runtime=runtime,
        Event=Event,
        get_elapsed_time=lambda start, stop: 1e3 * (stop.seconds - start.seconds),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(kernels_gpu, "_torch_sees_a_gpu", lambda: False)
    return cupy


@pytest.mark.usefixtures("cupy")
def test_everything_has_its_rows():
    compressors = [TopK(ratio=0.1)]
    if "sidco" in list_compressors():
        compressors.append(get_compressor({"id": "sidco", "ratio": 0.1}))
    rows = kernels_gpu.measure(Settings(NUMEL, (0.1,), compressors, repeats=2))
    names = [row["name"] for row in rows if row["name"] != "torch.topk"]
    compressing = [f"{entry.id}.compress" for entry in compressors]
    assert names == ["memcpy", *compressing, "spectrum", "spectrum.sampled", "decode"]
    for row in rows:
        assert row["copies"] == pytest.approx(row["median_s"] / rows[0]["median_s"])
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

    kernel = kernels_gpu.TopK("topk.compress", TopK(ratio=0.1), Gradients(NUMEL, put=cupy.asarray), ratio=0.1)
    for _ in range(3):
        kernel.prepare()
        before = kernel.residual.get() + kernel.gradient.get()
        kernel.run()
        sent = np.zeros(NUMEL, np.float32)
        sent[kernel.indices.get()] = kernel.values.get()
        np.testing.assert_array_equal(kernel.residual.get() + sent, before)


@pytest.mark.usefixtures("cupy")
def test_no_device(monkeypatch, capsys):
    def none():
        raise RuntimeError("cudaErrorNoDevice")

    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "getDeviceCount", none)
    assert main(["bench", "kernels", "--device", "gpu"]) == 2
    assert "--device gpu: cudaErrorNoDevice; use --device cpu" in capsys.readouterr().err
