"""Rows of ``mpicomp bench kernels`` on the host, on an emulated GPU, and on a GPU where there is one.

No time is asserted, only how times relate.
"""

import platform
import shutil
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from device import emulator, fake_cuda
from mpicomp.bench import kernels
from mpicomp.bench.kernels import Settings
from mpicomp.bench.measure.feedback import Gradients

from mpicomp.cli import main
from mpicomp.compressors import TopK, get_compressor
from mpicomp.compressors.kinds import Quantiser
from mpicomp.gpu.cuda import CudaDevice

SHORT = 3000
NUMEL = 20_000
RATIOS = (0.01, 0.1)
FIXED = {"memcpy", "spectrum"}
BY_RATIO = {"decode", "numpy.argpartition"}


def compressors_at(ratio):
    """Return every sparsifier and quantiser, at a ratio where it has one."""
    found = [get_compressor(name) for name in kernels.measurable()]
    return [
        get_compressor({**compressor.get_config(), "ratio": ratio}) if hasattr(compressor, "ratio") else compressor
        for compressor in found
    ]


@pytest.fixture(scope="module")
def rows():
    compressors = compressors_at(RATIOS[0])
    compressors += [compressor for compressor in compressors_at(RATIOS[1]) if hasattr(compressor, "ratio")]
    return kernels.measure(Settings(NUMEL, RATIOS, compressors, repeats=4))


def test_measure_has_a_row_of_each_kernel_and_ratio(rows):
    found = {(row["name"], row["ratio"]) for row in rows}
    assert len(found) == len(rows)
    expected = {(name, None) for name in FIXED} | {(name, ratio) for name in BY_RATIO for ratio in RATIOS}
    if find_spec("torch") is not None:
        expected |= {("torch.topk", ratio) for ratio in RATIOS}
    for compressor in compressors_at(RATIOS[0]):
        ratios = RATIOS if hasattr(compressor, "ratio") else (None,)
        expected |= {(f"{compressor.id}.compress", ratio) for ratio in ratios}
        if isinstance(compressor, Quantiser):
            expected |= {(f"{compressor.id}.pack", None), (f"{compressor.id}.unpack", None)}
    assert found == expected


def test_copies_are_medians_over_the_copy_of_the_run(rows):
    assert rows[0]["name"] == "memcpy"
    assert rows[0]["copies"] == 1
    for row in rows:
        assert row["numel"] == NUMEL
        assert row["copies"] == pytest.approx(row["median_s"] / rows[0]["median_s"])
        assert 0 < row["p25_s"] <= row["median_s"] <= row["p75_s"]
        assert row["threads"] == 1


def test_calls_follow_a_copy_each(rows):
    assert rows[0]["repeats"] == sum(row["repeats"] for row in rows[1:])
    assert {row["repeats"] for row in rows[1:]} <= {3, 4}


def test_rows_of_compressors_have_ratio_and_config(rows):
    for row in rows:
        assert (row["ratio_reached"] is None) == (not row["name"].endswith(".compress"))
        if row["name"] in ("topk.compress", "randomk.compress"):
            assert row["ratio_reached"] == pytest.approx(row["ratio"])
        if row["ratio_reached"] is not None:
            assert 0 <= row["ratio_reached"] <= 1
        if row["config"] is not None:
            identity, what = row["name"].split(".")
            assert get_compressor(row["config"]).id == identity
            assert what in ("compress", "pack", "unpack")
        assert (row["config"] is None) == (row["name"] in FIXED | BY_RATIO | {"torch.topk"})


# ---- on a GPU


@pytest.fixture(params=["emulated", "device"])
def cupy(request, monkeypatch):
    """Install a stand-in for CuPy, with the calls of the benchmark; or the real one on a GPU."""
    if request.param == "device":
        cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)
        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            pytest.skip(f"no GPU: {error}")
        return cupy
    if shutil.which(emulator.COMPILER) is None or platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the emulation needs g++ and x86-64")
    cupy = fake_cuda.install(monkeypatch, emulated=True)
    cupy.__version__ = "0"
    if find_spec("torch") is not None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return cupy


@pytest.mark.slow
@pytest.mark.usefixtures("cupy")
def test_measure_on_a_gpu_has_a_row_of_each_kernel():
    compressors = [TopK(ratio=0.1), get_compressor({"id": "sidco", "ratio": 0.1})]
    rows = kernels.measure(Settings(SHORT, (0.1,), compressors, repeats=2), CudaDevice(0))
    names = [row["name"] for row in rows if row["name"] != "torch.topk"]
    assert names == ["memcpy", "topk.compress", "sidco.compress", "spectrum", "decode"]
    for row in rows:
        assert row["copies"] == pytest.approx(row["median_s"] / rows[0]["median_s"])
        assert row["behind_copies"] == pytest.approx(row["behind_s"] / rows[0]["behind_s"])
        assert row["threads"] is None
        if row["name"].endswith(".compress"):
            assert row["ratio_reached"] == pytest.approx(0.1, rel=1e-9 if row["name"] == "topk.compress" else 0.5)


def test_step_on_a_gpu_loses_nothing(cupy):
    device = CudaDevice(0)
    kernel = kernels.compress_on_gpu(TopK(ratio=0.1), Gradients(SHORT, device=device))
    workspace = kernel.selecting.context.workspace
    with device.active():
        for _ in range(3):
            kernel.prepare()
            before = residual_of(kernel) + kernel.gradient.get()
            kernel.run()
            count = SHORT // 10
            sent = np.zeros(SHORT, np.float32)
            indices, values = (workspace.array(f"topk.{name}", count, kind) for name, kind in KINDS.items())
            sent[indices.get()] = values.get()
            np.testing.assert_array_equal(residual_of(kernel) + sent, before)


KINDS = {"indices": np.uint32, "values": np.dtype(np.float32)}  # as the compressor names them


def residual_of(kernel):
    [(_, residual)] = kernel.bucket.residuals()
    return residual.get()


@pytest.mark.usefixtures("cupy")
def test_command_without_a_gpu_is_refused(monkeypatch, capsys):
    def none():
        raise RuntimeError("cudaErrorNoDevice")

    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "getDeviceCount", none)
    assert main(["bench", "kernels", "--device", "gpu"]) == 2
    assert "--device gpu: cudaErrorNoDevice; use --device cpu" in capsys.readouterr().err
