"""A learned code by a convolutional network: trained with torch, run without."""

import itertools
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.gpu import HOST, current_device
from mpicomp.workspace import Workspace

_CHANNELS = 4  # of the code
_SLOPE = 0.2  # of the rectifiers
_SIMILARITY = 0.5  # weight of the second loss, see Autoencoder
_STRETCH = 4096  # values that an optimizer step looks at
_DECAY_MEAN = 0.9  # Adam's beta 1
_DECAY_SQUARE = 0.999  # Adam's beta 2
_TINY = 1e-8  # Adam's epsilon
_HALVING_STEPS = 100  # optimizer steps that halve the learning rate

Layer = tuple[tuple[int, ...], int]


class Autoencoder:
    """The network of LGC (arXiv 2103.08870): convolutions that halve the length, and transposed ones that double it.

    Values are ``count`` numbers of float32 or float64, scaled so that their mean square is about 1; at every step they
    stand for other elements of the same layers, in the same order of layers and ascending by index within each. Codes
    have the values' dtype.

    `encode`, `decode` and `decode_near` are part of every step: they allocate nothing, need no torch, return the same
    bits for the same input on every processor (kernels of `mpicomp.kernels.cpu.compile.exact`), and map infinity and
    NaN to infinity or NaN. Values of a GPU, some thousand, are coded on the host, where weights and states are.

    Each encoder layer has three taps and a stride of two; then channels are mixed to the four of the code. A decoder
    is the same in reverse, mixed to one channel. Behind all layers but those that mix there is a leaky rectifier, so
    that codes of either sign can be averaged; the paper has one behind the code, too. ``encoder`` and ``decoder`` have
    the channels of as many layers: n of them make the code ``4 / 2**n`` as long as the values.

    Losses are shares of the energy of the coded values. Without a leader a second loss is that of noise decoded by
    `decode_near`, which error feedback resembles. With a leader there is a decoder for each rank, and a second loss,
    half as heavy as the first, of the difference of ranks' codes. ``passes`` steps of Adam are made for each step of
    training, each on a stretch of at most 4096 values, at a rate that falls. Values move by one place at every step
    (see `begin_step`), so that the code does not always leave out the same ones.

    With ``published`` the training is the paper's: plain descent at a constant rate, on all values, by the paper's
    losses alone, with values where they are. docs/papers.md has the other differences.
    """

    def __init__(
        self,
        workspace: Workspace,
        seed: int = 0,
        encoder: Sequence[int] = (8, 16, 16, 8),
        decoder: Sequence[int] = (8, 16, 16, 8),
        learning_rate: float = 3e-3,
        passes: int = 4,
        published: bool = False,
    ) -> None:
        self.workspace = workspace if workspace.device is HOST else Workspace()
        self.seed = seed
        self._stride: int = 2 ** len(encoder)
        pairs = pairwise([1, *encoder]), pairwise([_CHANNELS, *decoder])
        # Shape of weights and number of biases of each layer; transposed convolutions have their inputs first.
        self._encoder: list[Layer] = [*(((o, i, 3), o) for i, o in pairs[0]), ((_CHANNELS, encoder[-1]), _CHANNELS)]
        self._decoder: list[Layer] = [*(((i, o, 3), o) for i, o in pairs[1]), ((1, decoder[-1]), 1)]
        self._room = kernels.conv_room(max(1, _CHANNELS, *encoder, *decoder))
        self._learning_rate = learning_rate
        self._passes = passes
        self._published = published
        self._shift = 0
        self._weights: NDArray[np.float32] = np.zeros(0, np.float32)
        self._moments: NDArray[np.float32] = np.zeros((2, 0), np.float32)
        self._steps = 0
        self._source: Any = None  # the state or the weights that are in use
        self._cut: Any = None  # the weights by layer

    @property
    def least(self) -> int:
        """Fewest values that it can code."""
        return 4 * self._stride  # four numbers of each channel of the code

    def length(self, count: int) -> int:
        """Return the number of numbers in the code of ``count`` values."""
        return _CHANNELS * (self._padded(count) // self._stride)

    def begin_step(self, step: int) -> None:
        """Announce the step whose values come next, the same on all ranks, before its first `encode` or `decode`."""
        self._shift = 0 if self._published else step % self._stride

    def encode(self, values: NDArray[np.floating], out: NDArray[np.floating]) -> None:
        """Write the code of values, shape (count,), to ``out``, shape (length(count),)."""
        places = self._padded(values.size)
        layer = self._array("values", 1, places, values.dtype)
        device = current_device()
        _move(device.to_host(values), self._shift, layer[0])
        *convolutions, (weights, bias) = self._layers_in_use()[0]
        scratch = self.workspace.array("autoencoder.scratch", self._room, values.dtype)
        for place, (kernel, kernel_bias) in enumerate(convolutions):
            places //= 2
            below, layer = layer, self._array(f"layer {place}", len(kernel), places, values.dtype)
            kernels.conv_halve(below, kernel, kernel_bias, _SLOPE, layer, scratch, layer)
        code = out if device is HOST else np.empty(out.size, out.dtype)
        kernels.conv_mix(layer, weights, bias, code.reshape(_CHANNELS, places))
        if code is not out:
            device.assign(out, code)

    def decode(self, code: NDArray[np.floating], out: NDArray[np.floating], worker: int = 0) -> None:
        """Write the values of a code to ``out``; with a decoder for each rank, those of rank ``worker``."""
        self._decode([code], [out], worker)

    def decode_near(
        self,
        code: NDArray[np.floating],
        centre: NDArray[np.floating],
        out: NDArray[np.floating],
        out_centre: NDArray[np.floating],
    ) -> None:
        """Decode the mean of all codes, ``centre``, and this rank's code by the affine map that `decode` is around it.

        So the mean of ``out`` over ranks is ``out_centre``, which equals the result of `decode` bit for bit.
        """
        self._decode([centre, code], [out_centre, out], 0)

    def learn(self, values: NDArray[np.floating], leader: int | None = None) -> float:
        """Learn from one step's values, finite, shape (ranks, count). On one rank; may allocate, and uses torch.

        Without a leader the mean of all codes is decoded to the mean of all values; with one, the leader's code to
        every rank's values, by the decoder of each. Return the squared error before learning, as a share of the energy
        of the values: 1 is that of zeros; 0 if there was no energy.
        """
        import torch

        ranks = 1 if leader is None else len(values)
        if self._weights.size != self.size(ranks):
            self._begin(ranks)
        random = np.random.default_rng([self.seed, self._steps])
        stretch = values.shape[1] if self._published else min(values.shape[1], _STRETCH)
        places = np.zeros((len(values), self._padded(stretch)), np.float32)
        flat = torch.from_numpy(self._weights).requires_grad_()
        errors = []
        for _ in range(self._passes):
            start, shift = random.integers([values.shape[1] - stretch + 1, 1 if self._published else self._stride])
            for rank_values, moved in zip(values[:, start : start + stretch], places, strict=True):
                _move(rank_values, shift, moved)
            noise = random.standard_normal(places.shape, np.float32)
            if not np.square(places if leader is not None else places.mean(axis=0)).sum() > 0:
                errors.append(0.0)
                continue
            inputs = torch.from_numpy(places)[:, None], torch.from_numpy(noise)[:, None]
            with torch.inference_mode(False), torch.enable_grad():  # the caller, which averages gradients, has them off
                loss, error = self._losses(torch, flat, *inputs, leader)
                (gradient,) = torch.autograd.grad(loss, flat)
            errors.append(float(error))
            self._step(gradient.numpy())
        self._cut, self._source = None, self
        return errors[0]

    def size(self, ranks: int) -> int:
        """Return the number of weights, with a decoder for each of ``ranks``."""
        return _size(self._encoder) + ranks * _size(self._decoder)

    def weights(self) -> NDArray[np.float32]:
        """Return the weights of the encoder, then of each decoder, shape (size,). Only after `learn`."""
        return self._weights.copy()

    def use(self, weights: NDArray[np.float32]) -> None:
        """Load the weights that `weights` returned, on this rank or another one, unless they are in use."""
        if weights is not self._source:
            self._weights = np.array(weights, np.float32)
            self._cut, self._source = None, weights

    def state(self) -> dict[str, Any]:
        """Return copies of all that `learn` needs to continue as if it had never stopped."""
        state = {"weights": self.weights(), "moments": self._moments.copy(), "steps": self._steps}
        self._source = state
        return state

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state that `state` returned, unless it is in use; None is that before anything was learned."""
        if state is not self._source:
            found = state or {"weights": (), "moments": ((), ()), "steps": 0}
            self.use(found["weights"])
            self._moments = np.array(found["moments"], np.float32)
            self._steps, self._source = int(found["steps"]), state

    def _begin(self, ranks: int) -> None:
        random = np.random.default_rng(self.seed)
        self._weights = np.zeros(self.size(ranks), np.float32)
        self._moments = np.zeros((2, self._weights.size), np.float32)
        self._steps = 0
        encoder, decoders = self._layers(self._weights)
        for weights, _ in encoder:
            weights[:] = random.standard_normal(weights.shape) / np.sqrt(prod(weights.shape[1:]))
        for weights, _ in itertools.chain(*decoders):
            # An output of a transposed convolution has one tap of each input or two
            inputs = 1.5 * weights.shape[0] if weights.ndim == 3 else weights.shape[1]
            weights[:] = random.standard_normal(weights.shape) / np.sqrt(inputs)

    def _layers_in_use(self) -> Any:
        if self._cut is None:
            self._cut = self._layers(self._weights)
        return self._cut

    def _layers(self, flat: Any) -> tuple[list[tuple[Any, Any]], list[list[tuple[Any, Any]]]]:
        start, width = _size(self._encoder), _size(self._decoder)
        decoders = [_parts(flat[place : place + width], self._decoder) for place in range(start, len(flat), width)]
        return _parts(flat[:start], self._encoder), decoders

    def _decode(self, codes: list[NDArray[np.floating]], outs: list[NDArray[np.floating]], worker: int) -> None:
        """Run a decoder for each code; the rectifiers of the first decide for all."""
        dtype = codes[0].dtype
        device = current_device()
        layers = [code.reshape(_CHANNELS, -1) for code in device.to_host_all(codes)]
        places = layers[0].shape[1]
        *convolutions, (weights, bias) = self._layers_in_use()[1][worker]
        scratch = self.workspace.array("autoencoder.scratch", self._room, dtype)
        for depth, (kernel, kernel_bias) in enumerate(convolutions):
            places *= 2
            below = layers
            layers = [self._array(f"layer {depth} of {n}", len(kernel_bias), places, dtype) for n in range(len(codes))]
            gate = layers[0]
            for values, layer in zip(below, layers, strict=True):
                kernels.conv_double(values, kernel, kernel_bias, _SLOPE, gate, scratch, layer)
        whole = self._array("values", 1, places, dtype)
        for layer, out in zip(layers, outs, strict=True):
            kernels.conv_mix(layer, weights, bias, whole)
            first = min(out.size, places - self._shift)
            values = out if device is HOST else np.empty(out.size, dtype)
            values[:first] = whole[0, self._shift : self._shift + first]
            values[first:] = whole[0, : out.size - first]
            if values is not out:
                device.assign(out, values)

    def _losses(self, torch: Any, flat: Any, values: Any, noise: Any, leader: int | None) -> tuple[Any, Any]:
        """Return the loss, and the squared error as a share of the energy; shapes are (ranks, 1, places)."""
        functional = torch.nn.functional
        encoder, decoders = self._layers(flat)

        def encoded(layer: Any) -> Any:
            *convolutions, (weights, bias) = encoder
            for kernel, kernel_bias in convolutions:
                layer = functional.conv1d(layer, kernel, kernel_bias, stride=2, padding=1)
                layer = functional.leaky_relu(layer, _SLOPE)
            return functional.conv1d(layer, weights[:, :, None], bias)

        def decoded(layer: Any, worker: int = 0, slopes: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
            *convolutions, (weights, bias) = decoders[worker]
            used = []
            for depth, (kernel, kernel_bias) in enumerate(convolutions):
                layer = functional.conv_transpose1d(layer, kernel, kernel_bias, stride=2, padding=1, output_padding=1)
                used.append(slopes[depth] if slopes else torch.where(layer.detach() < 0, _SLOPE, 1.0))
                layer = layer * used[-1]
            return functional.conv1d(layer, weights[:, :, None], bias), used

        def missed(results: Any, targets: Any) -> Any:
            return (results - targets).square().sum() / targets.square().sum()

        codes = encoded(values)
        mean = codes.mean(dim=0, keepdim=True)
        if leader is None:
            error = missed(decoded(mean)[0], values.mean(dim=0, keepdim=True))
            if self._published:
                return error, error.detach()
            codes = encoded(noise)
            _, slopes = decoded(codes.mean(dim=0, keepdim=True))
            return error + missed(decoded(codes, slopes=slopes)[0], noise), error.detach()
        leaders_code = codes[leader : leader + 1]
        error = missed(torch.cat([decoded(leaders_code, worker)[0] for worker in range(len(values))]), values)
        unlike = (codes - mean).square().sum() / (codes.square().sum() + _TINY)
        return error + _SIMILARITY * unlike, error.detach()

    def _step(self, gradient: NDArray[np.float32]) -> None:
        if not np.isfinite(gradient).all():
            return
        self._steps += 1
        if self._published:
            self._weights -= self._learning_rate * gradient
            return
        mean, square = self._moments
        mean += (1 - _DECAY_MEAN) * (gradient - mean)
        square += (1 - _DECAY_SQUARE) * (gradient * gradient - square)
        mean_scale, square_scale = 1 - _DECAY_MEAN**self._steps, 1 - _DECAY_SQUARE**self._steps
        rate = self._learning_rate / (1 + (self._steps - 1) / _HALVING_STEPS)
        self._weights -= (rate / mean_scale) * mean / (np.sqrt(square / square_scale) + _TINY)

    def _padded(self, count: int) -> int:
        return -(-count // self._stride) * self._stride

    def _array(self, name: str, channels: int, places: int, dtype: np.dtype[Any]) -> NDArray[np.floating]:
        array: NDArray[np.floating] = self.workspace.array(f"autoencoder.{name}", channels * places, dtype)
        return array.reshape(channels, places)


def _size(layers: Sequence[Layer]) -> int:
    return sum(prod(shape) + biases for shape, biases in layers)


def _parts(flat: Any, layers: Sequence[Layer]) -> list[tuple[Any, Any]]:
    parts, start = [], 0
    for shape, biases in layers:
        middle = start + prod(shape)
        parts.append((flat[start:middle].reshape(shape), flat[middle : middle + biases]))
        start = middle + biases
    return parts


def _move(values: NDArray[np.floating], shift: int, out: NDArray[np.floating]) -> None:
    """Write values to places that are ``shift`` further, cyclically, and zeros elsewhere: 1 2 3 by 2 is 3 0 1 2."""
    first = min(values.size, out.size - shift)
    out[:] = 0
    out[shift : shift + first] = values[:first]
    out[: values.size - first] = values[first:]
