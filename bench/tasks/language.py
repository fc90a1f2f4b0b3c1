"""Data of language models: tokens of a text, in samples, with whole documents held out."""

from __future__ import annotations

import functools
import os
from typing import ClassVar

import numpy as np
import torch
from mpicomp.bench.tasks import corpus
from mpicomp.bench.tasks.corpus import Vocabulary
from mpicomp.bench.tasks.sampling import Sampler, evenly
from mpicomp.bench.tasks.task import Task
from torch import nn
from torch.nn import functional

# Held-out tokens that the quality is measured on: one to three seconds on one core.
_EVALUATED = 20_480


class LanguageTask(Task):
    """Predict every next token of a text; quality is the held-out loss in nats a token.

    The text is the Python standard library's own sources, more than 5 MB that every installation has. Tokens are of at
    most four letters, with bytes for rare ones. Whole files are held out. The text differs a little between versions
    of Python, hence so does the loss: compare runs of one installation. A user's data is a text file, or a folder of
    text files, in UTF-8.

    A task derives from it, with ``name``, ``length``, ``vocabulary``, ``model`` and ``optimizer``. Its model takes
    token numbers of shape (samples, length) and returns the logits of each one's next token.
    """

    quality_name = "held-out loss"
    better = "lower"
    glance = 0.25
    length: ClassVar[int]  # tokens of a sample
    vocabulary: ClassVar[int]  # largest number of different tokens

    def __init__(self, seed: int = 0, data: str | os.PathLike[str] | None = None) -> None:
        self.seed = seed
        if data is None:
            self._tokens, test, self.tokens = _bundled(self.name, self.vocabulary)  # once, whatever the seeds
        else:
            documents = corpus.from_path(self.name, os.fsdecode(data))
            self._tokens, test, self.tokens = _tokens(documents, self.vocabulary)
        self._train = self._samples(self._tokens)
        self._test = self._samples(test)
        if len(self._train) < self.batch_size or not len(self._test):
            raise ValueError(
                f"{self.name}: too short a text: {len(self._tokens)} tokens to train on and {len(test)} held out, "
                f"at least {self.batch_size * self.length + 1} and {self.length + 1} are needed"
            )
        # Evenly over the held-out text, so that every file has its share.
        share = _EVALUATED / self.length / len(self._test)
        if share < 1:
            self._test = self._test[evenly(len(self._test), share)]
        self._sampler = Sampler(self.name, len(self._train), self.batch_size, seed)

    def batch(self, step: int, rank: int, ranks: int) -> torch.Tensor:
        return self._gather(self._train, self._sampler.indices(step, rank, ranks))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.to(next(model.parameters()).device)
        return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, share: float = 1.0) -> float:
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
        # They share no target: each is `length` tokens and the one after them.
        if len(tokens) <= self.length:
            return np.empty((0, self.length + 1), tokens.dtype)
        return np.lib.stride_tricks.sliding_window_view(tokens, self.length + 1)[:: self.length]

    @staticmethod
    def _gather(samples: np.ndarray, indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(samples[indices].astype(np.int64))


def _tokens(documents: list[str], size: int) -> tuple[np.ndarray, np.ndarray, int]:
    train, test = corpus.split(documents)
    vocabulary = Vocabulary(train, size)
    return vocabulary.encode(train), vocabulary.encode(test), len(vocabulary)


@functools.cache
def _bundled(task: str, size: int) -> tuple[np.ndarray, np.ndarray, int]:
    return _tokens(corpus.standard_library(task), size)
