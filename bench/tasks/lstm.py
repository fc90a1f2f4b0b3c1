"""A language model on source code: the task whose gradients are large enough to be worth compressing."""

from __future__ import annotations

import numpy as np
import torch
from mpicomp.bench.tasks.language import LanguageTask
from mpicomp.bench.tasks.sampling import seeded
from torch import nn

from mpicomp.registry import register

_WIDTH = 512  # width of the language model


class LanguageModel(nn.Module):
    """Predict the next token with one LSTM layer."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.output = nn.Linear(width, tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of every next token, from an empty state."""
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: torch.Tensor = self.output(hidden)
        return logits


@register
class TextLSTM(LanguageTask):
    """Model the Python standard library's own sources with an LSTM; quality is the held-out loss in nats a token.

    512 units, and 4096 tokens of at most four letters: 6.3 million parameters, a third of which are embeddings whose
    gradient is zero where a token is absent. A sample is 20 tokens, read from an empty state; a rank sees 8 of them in
    a step.
    """

    name = "text-lstm"
    steps = 300
    clip = None
    batch_size = 8
    length = 20
    vocabulary = 4096

    def model(self) -> LanguageModel:
        with seeded(self.seed):
            model = LanguageModel(self.tokens, _WIDTH)
        # How frequent tokens are can be counted. Left to be learned it takes the first tens of steps: dense is
        # better for having it, and a sparse exchange falls behind less.
        counts = np.bincount(self._tokens, minlength=self.tokens) + 1
        with torch.no_grad():
            model.output.bias.copy_(torch.from_numpy(np.log(counts / counts.sum())))
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=4e-3, fused=True)
