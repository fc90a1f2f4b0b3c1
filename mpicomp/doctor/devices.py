"""Which GPUs a rank may use, as nvidia-smi and the mask tell it; CUDA is not started."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpicomp.errors import LaunchError
from mpicomp.system.gpus import Gpu, installed, visible

_HIDDEN = ("", "-1", "NoDevFiles")  # how users and Slurm write that there shall be none


def mask_of(environ: Mapping[str, str] | None = None) -> str | None:
    """Return ``CUDA_VISIBLE_DEVICES``, None where it is not set."""
    return (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")


def look(environ: Mapping[str, str] | None = None, listing: str | None = None) -> tuple[list[Gpu], str | None]:
    """Return the GPUs that this process may use, and the error in the mask where it names others.

    A rank without a GPU is nothing wrong: mpicomp runs on CPUs too.

    Parameters
    ----------
    environ
        The environment; that of this process when it is not given.
    listing
        Output of ``nvidia-smi -L``; it is called when this is not given.
    """
    mask = mask_of(environ)
    if mask is None:
        return [gpu for gpu in installed(listing) if gpu.index], None
    if mask.partition(",")[0].strip() in _HIDDEN:
        return [], None
    try:
        return visible(environ, listing), None
    except LaunchError as error:
        return [], str(error)


def gpus(environ: Mapping[str, str] | None = None, listing: str | None = None) -> list[str]:
    r"""Return the NVIDIA GPUs that this process may use, in the order in which CUDA numbers them.

    Parameters
    ----------
    environ, listing
        See `look`.

    Examples
    --------
    >>> gpus({"CUDA_VISIBLE_DEVICES": "1"}, "GPU 0: A (UUID: GPU-aa)\nGPU 1: B (UUID: GPU-bb)")
    ['1: B']
    """
    return [str(gpu) for gpu in look(environ, listing)[0]]
