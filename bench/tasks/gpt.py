"""A GPT on source code, with the optimizer, the schedule and the clipping that scripts train such models with."""

from __future__ import annotations

import math

import torch
from mpicomp.bench.tasks.language import LanguageTask
from mpicomp.bench.tasks.sampling import seeded
from torch import nn
from torch.nn import functional

from mpicomp.registry import register

_HEAD = 64  # width of an attention head
_DEVIATION = 0.02  # of initial weights, as in GPT-2
_WARM_UP = 0.1  # share of the steps in which the rate rises
_LAST = 0.1  # share of the rate that is left in the last step


class Block(nn.Module):
    """Causal attention and a multilayer perceptron, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.perceptron_norm = nn.LayerNorm(width, bias=False)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return an array of the same shape, (samples, length, width)."""
        hidden = hidden + self._attend(self.attention_norm(hidden))
        expanded = functional.gelu(self.expand(self.perceptron_norm(hidden)))
        added: torch.Tensor = hidden + self.contract(expanded)
        return added

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = self.queries_keys_values(hidden).unflatten(-1, (3, -1, _HEAD))  # (samples, length, 3, heads, 64)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        projected: torch.Tensor = self.attended(attended.transpose(1, 2).flatten(-2))
        return projected


class GPT(nn.Module):
    """Predict the next token with a transformer whose layers normalise their input."""

    def __init__(self, tokens: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # Layers that add to the residual path start smaller, so that the sum over all layers keeps its size.
                added = name.endswith(("attended.weight", "contract.weight"))
                nn.init.normal_(parameter, std=_DEVIATION / (2 * layers) ** 0.5 if added else _DEVIATION)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of every next token; the output matrix is that of the embedding."""
        hidden = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.blocks(hidden)), self.embedding.weight)


def warm_up_and_cosine(step: int, steps: int) -> float:
    """Return the share of the rate in a step: it rises linearly to all of it, and falls on a cosine to a tenth.

    >>> [warm_up_and_cosine(step, 20) for step in (0, 1, 10, 19)]
    [0.5, 1.0, 0.55, 0.1]
    """
    warm_up = max(1, round(_WARM_UP * steps))
    done = min(step + 1, steps)
    if done <= warm_up:
        return done / warm_up
    fallen = (done - warm_up) / (steps - warm_up)
    return _LAST + (1 - _LAST) * (1 + math.cos(math.pi * fallen)) / 2


@register
class TextGPT(LanguageTask):
    """Model the Python standard library's own sources with a GPT; quality is the held-out loss in nats a token.

    Six layers of width 192 and 2048 tokens of at most four letters, which are embedded by the matrix that also makes
    the output: 3.1 million parameters. A sample is 64 tokens; a rank sees 12 of them in a step. AdamW decays matrices
    alone, its rate warms up and falls on a cosine, and the averaged gradient is clipped.
    """

    name = "text-gpt"
    steps = 300
    clip = 1.0
    batch_size = 12
    length = 64
    vocabulary = 2048
    width = 192
    layers = 6
    rate = 2e-3

    def model(self) -> GPT:
        with seeded(self.seed):
            return GPT(self.tokens, self.length, self.width, self.layers)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        scales = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": scales, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95), fused=True)

    def schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_and_cosine(step, steps))
