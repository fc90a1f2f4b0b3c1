"""DeMo with small chunks, as docs/updates.md recommends it; ``--exchange demo``."""

from typing import Any

NAME = "demo"
COMPRESSOR: dict[str, Any] = {"id": "dcttopk", "ratio": 0.0125, "side": 16, "wire": "q4"}
"""Three of 256 coefficients, in four bits."""
SETTINGS: dict[str, Any] = {"outer": {"sign": True, "lr": 1.0}, "feedback_decay": 0.999}
"""Of `mpicomp.torch.UpdateOptimizer`, around plain gradient descent."""
