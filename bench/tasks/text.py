"""A language model on source code: the task whose gradients are large enough to be worth compressing."""

from __future__ import annotations

import functools
import os

import numpy as np
import torch
from mpicomp.bench.tasks import corpus
from mpicomp.bench.tasks.sampling import Sampler, evenly
from mpicomp.bench.tasks.seeding import seeded
from mpicomp.bench.tasks.task import Task
from mpicomp.bench.tasks.tokens import Vocabulary
from torch import nn
from torch.nn import functional

from mpicomp.registry import register

_VOCABULARY = 4096  # tokens of the vocabulary
_WIDTH = 512  # width of the language model

# Samples; about a second and a half on one core.
_EVALUATED = 1024


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
class TextLSTM(Task):
    """Model the Python standard library's own sources; quality is the held-out loss in nats a token.

    More than 5 MB of text that every installation has, tokens of at most four letters with bytes for what is rare,
    and an LSTM of 512 units: 6.3 million parameters, a third of which are embeddings whose gradient is zero where a
    token is absent. Whole files are held out. A sample is 20 tokens, read from an empty state; a rank sees 8 of them
    in a step. The optimiser's setting is explained in TUNING.md.

    The text differs a little between versions of Python, hence so does the loss: compare runs of one
    installation.

    Parameters
    ----------
    seed : int
        Seed of the run.
    data : path, optional
        A text file, or a folder of text files, read as UTF-8. A small text has a smaller vocabulary and hence
        a smaller model.
    """

    name = "text-lstm"
    quality_name = "held-out loss"
    better = "lower"
    steps = 300
    clip = None
    glance = 0.25
    batch_size = 8
    length = 20

    def __init__(self, seed: int = 0, data: str | os.PathLike[str] | None = None) -> None:
        self.seed = seed
        train, test, self.tokens = _bundled() if data is None else _tokens(corpus.from_path(os.fsdecode(data)))
        counts = np.bincount(train, minlength=self.tokens) + 1
        self._log_frequencies = torch.from_numpy(np.log(counts / counts.sum()))
        self._train = self._samples(train)
        self._test = self._samples(test)
        if len(self._train) < self.batch_size or not len(self._test):
            raise ValueError(
                f"text-lstm: too short a text: {len(train)} tokens to train on and {len(test)} held out, "
                f"at least {self.batch_size * self.length + 1} and {self.length + 1} are needed"
            )
        # Evenly over the held-out text, so that every file has its share.
        if len(self._test) > _EVALUATED:
            self._test = self._test[evenly(len(self._test), _EVALUATED / len(self._test))]
        self._sampler = Sampler(self.name, len(self._train), self.batch_size, seed)

    def model(self) -> LanguageModel:
        """Return a new model, initialised from the seed."""
        with seeded(self.seed):
            model = LanguageModel(self.tokens, _WIDTH)
        # How frequent tokens are can be counted. Left to be learned it takes the first tens of steps: dense is
        # better for having it, and a sparse exchange falls behind less. Measured in TUNING.md.
        with torch.no_grad():
            model.output.bias.copy_(self._log_frequencies)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the setting that TUNING.md found best for dense exchange; it says why it is fused."""
        return torch.optim.Adam(model.parameters(), lr=4e-3, fused=True)

    def batch(self, step: int, rank: int, ranks: int) -> torch.Tensor:
        """Return token numbers of shape (samples, length + 1): each token is the target of the last."""
        return self._gather(self._train, self._sampler.indices(step, rank, ranks))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy in nats a token."""
        batch = batch.to(next(model.parameters()).device)
        return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, share: float = 1.0) -> float:
        """Return the mean loss on a fixed part of the held-out text, or on a share of that."""
        training = model.training
        model.eval()
        total = 0.0
        indices = evenly(len(self._test), share)
        for start in range(0, len(indices), 64):
            batch = self._gather(self._test, indices[start : start + 64])
            total += float(self.loss(model, batch)) * len(batch)
        model.train(training)
        return total / len(indices)

    def _samples(self, tokens: np.ndarray) -> np.ndarray:
        """View the text as samples that share no target: each is `length` tokens and the one after them."""
        if len(tokens) <= self.length:
            return np.empty((0, self.length + 1), tokens.dtype)
        return np.lib.stride_tricks.sliding_window_view(tokens, self.length + 1)[:: self.length]

    @staticmethod
    def _gather(samples: np.ndarray, indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(samples[indices].astype(np.int64))


def _tokens(documents: list[str]) -> tuple[np.ndarray, np.ndarray, int]:
    train, test = corpus.split(documents)
    vocabulary = Vocabulary(train, _VOCABULARY)
    return vocabulary.encode(train), vocabulary.encode(test), len(vocabulary)


@functools.cache
def _bundled() -> tuple[np.ndarray, np.ndarray, int]:
    """Tokenise the standard library once a process, however many tasks and seeds are loaded."""
    return _tokens(corpus.standard_library())
