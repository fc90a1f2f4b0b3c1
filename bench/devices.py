"""The GPU of a rank, for benchmarks and trainings: errors name in a line the missing part, and the remedy."""

import importlib
from typing import Any

from mpicomp.errors import ConfigurationError, LaunchError, MpicompError
from mpicomp.gpu.cuda import CudaDevice, cuda_device
from mpicomp.job import gpus

Found = int | MpicompError  # the number of a rank's GPU, or the reason for which it has none


def find() -> Found:
    """Find the GPU of this process, before MPI starts: it calls another program."""
    try:
        return gpus.local_device()
    except LaunchError as error:
        return error


def device_on(command: str, found: Found | None = None) -> CudaDevice:
    """Return a device on a GPU, which is made the current one; by default on the current one."""
    cuda = _cupy(command).cuda
    number = cuda.runtime.getDevice() if found is None else _number(command, found)
    try:
        cuda.Device(number).use()
    except RuntimeError as error:  # CuPy's own is one
        raise ConfigurationError(f"{command}: --device gpu: {error}; use --device cpu") from error
    return cuda_device(number, False)


def device_name(command: str) -> str:
    """Return the name of the current GPU."""
    runtime = _cupy(command).cuda.runtime
    try:
        if runtime.getDeviceCount() == 0:
            raise ConfigurationError(f"{command}: --device gpu: there is no GPU; use --device cpu")
        name = runtime.getDeviceProperties(runtime.getDevice())["name"]
    except RuntimeError as error:  # CuPy's own is one
        raise ConfigurationError(f"{command}: --device gpu: {error}; use --device cpu") from error
    return name.decode() if isinstance(name, bytes) else str(name)


def torch_device(command: str, found: Found) -> Any:
    """Return torch's device of a GPU, which is made the current one."""
    torch = importlib.import_module("torch")
    number = _number(command, found)
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"{command}: --device gpu needs a PyTorch with CUDA, and torch {torch.__version__} finds no GPU; install "
            "one for your CUDA (https://pytorch.org/get-started), or use --device cpu"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _number(command: str, found: Found) -> int:
    if isinstance(found, MpicompError):
        raise ConfigurationError(f"{command}: --device gpu: {found}; or use --device cpu")
    return found


def _cupy(command: str) -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise ConfigurationError(
            f"{command}: --device gpu needs CuPy ({error}); pip install 'mpicomp[cuda12]' or 'mpicomp[cuda13]'"
        ) from error
