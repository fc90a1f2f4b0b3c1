"""Checkpoints: one file a rank, written so that a crash at any moment leaves one that can be loaded."""

from mpicomp.checkpoint.redistribution import weights
from mpicomp.checkpoint.rounds import load_checkpoint, load_rounds, save_checkpoint, save_rounds

__all__ = ["load_checkpoint", "load_rounds", "save_checkpoint", "save_rounds", "weights"]
