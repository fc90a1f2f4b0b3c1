"""Which GPU a process works on, found out before MPI starts.

A CUDA-aware MPI library takes the device that is current when it is initialised, so the ranks of a host have to share
its GPUs out among themselves before they can talk to each other. Until then there are only the launcher's variables of
this process, and a mask that the user may have set.
"""

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from mpicomp.errors import LaunchError
from mpicomp.job import launcher

_MASK = "CUDA_VISIBLE_DEVICES"
NO_GPU_MASKS = ("", "-1", "NoDevFiles")  # how users and Slurm hide all GPUs
_ASK = "ask the job for one (Slurm: --gpus-per-task=1, or --gres=gpu:1 for a node)"


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a part of one (MIG), which has no index of its own."""

    index: str
    name: str
    uuid: str

    def __str__(self) -> str:
        return f"{self.index}: {self.name}" if self.index else f"{self.uuid}: {self.name}"


def installed(listing: str | None = None) -> list[Gpu]:
    r"""Return the NVIDIA GPUs that this process may open; a container or Slurm may keep others from it.

    >>> [str(gpu) for gpu in installed("GPU 0: A (UUID: GPU-aa)\n  MIG 1g.5gb Device 0: (UUID: MIG-bb)")]
    ['0: A', 'MIG-bb: MIG 1g.5gb']
    """
    if listing is None:
        try:
            command = ["nvidia-smi", "-L"]
            listing = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            return []
    rows = re.findall(r"^(?:GPU (\d+): (.*?)| +(MIG \S+) +Device +\d+:) \(UUID: (\S+)\)", listing, re.MULTILINE)
    return [Gpu(index, name or part, uuid) for index, name, part, uuid in rows]


def visible(environ: Mapping[str, str] = os.environ, listing: str | None = None) -> list[Gpu]:
    """Return the GPUs that CUDA shows this process, in the order in which it numbers them.

    None, a mask that hides all of them, and one that names a GPU that is not here, are a `LaunchError`: CUDA would
    leave that one and those behind it out without a word.
    """
    mask = environ.get(_MASK)
    found = installed(listing)
    host = socket.gethostname()
    if not found:
        raise LaunchError(f"gpu: a process that works on a GPU needs one, and nvidia-smi lists none on {host}; {_ASK}")
    whole = [gpu for gpu in found if gpu.index]
    if mask is None:
        return whole
    words = [word.strip() for word in mask.split(",")]
    if words[0] in NO_GPU_MASKS:
        raise LaunchError(f"gpu: {_MASK}='{mask}' hides every GPU of {host} from this process; unset it, or {_ASK}")
    chosen = []
    for word in words:
        # CUDA takes the beginning of a device's name for it.
        prefix = word.startswith(("GPU-", "MIG-"))
        match = [gpu for gpu in found if gpu.index == word or (prefix and gpu.uuid.startswith(word))]
        if not match:
            raise LaunchError(
                f"gpu: {_MASK}={mask} names '{word}', which this process does not have; on {host} it has "
                f"{', '.join(map(str, found))}. The mask is that of another rank or host, or was set after the "
                "job had bound GPUs; unset it, or name GPUs from this list"
            )
        chosen.append(match[0])
    return chosen


def local_device(environ: Mapping[str, str] = os.environ, listing: str | None = None) -> int:
    r"""Choose the GPU of this process among those of its host, before MPI starts.

    The ranks of a host take its GPUs in turn; where there are more ranks than GPUs, some share one. A mask in
    ``CUDA_VISIBLE_DEVICES`` is respected: numbers count the GPUs that it shows. If it shows one GPU, as when Slurm
    gives one to each task, that is device 0 for every rank.

    Call it before ``mpi4py.MPI`` is imported, and make the device current:
    ``torch.cuda.set_device(mpicomp.local_device())`` or ``cupy.cuda.Device(mpicomp.local_device()).use()``. It starts
    another program (nvidia-smi), which not every network survives once MPI is there.

    Parameters
    ----------
    environ, listing
        See `visible`.

    Returns
    -------
    int
        The device's number as CUDA counts in this process, from 0.

    Raises
    ------
    LaunchError
        See `visible`; and where there are several GPUs and several ranks, and the launcher does not tell which of the
        host's ranks this one is. Not collective: the ranks on other hosts may not raise.

    Examples
    --------
    >>> two = "GPU 0: A (UUID: GPU-aa)\nGPU 1: B (UUID: GPU-bb)"
    >>> step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    >>> local_device(step, two), local_device(step | {"CUDA_VISIBLE_DEVICES": "1"}, two)
    (1, 0)
    """
    shown = visible(environ, listing)
    launch = launcher.detect(environ)
    if len(shown) == 1 or launch is None or launch.size == 1:
        return 0
    if launch.local_rank is None:
        raise LaunchError(
            f"gpu: {len(shown)} GPUs are to be shared out, and {launcher.describe(launch)} does not tell which of this "
            f"host's ranks this is; set {_MASK} for each rank, so that it shows one"
        )
    return launch.local_rank % len(shown)
