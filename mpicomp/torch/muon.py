"""Muon for hidden matrices and AdamW for the rest, whose changes are exchanged in one bit an element."""

import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mpicomp.compressors import Compressor, get_compressor
from mpicomp.errors import ConfigurationError
from mpicomp.mpi.connect import connected
from mpicomp.reducer import Reducer
from mpicomp.reducer.agreement import run_collectively
from mpicomp.reducer.settings import check_arguments
from mpicomp.setting_checks import check_kind as check_kind_of_setting
from mpicomp.torch.combined import CombinedOptimizer
from mpicomp.torch.parameters import NamedParameters, check_kind, named_pairs
from mpicomp.torch.shards import from_whole, is_sharded, local_of
from mpicomp.torch.states import name_of
from mpicomp.torch.updates import UpdateOptimizer

LR, ADAMW_LR, WEIGHT_DECAY, SYNC_EVERY, COMPRESSOR = 0.02, 3e-3, 0.1, 10, "onebit"
MOMENTUM = 0.9  # of a rank's Muon: its noise lasts 1 / (1 - momentum) steps, as many as are between two exchanges
FEEDBACK_DECAY = 0.9
_MAX_GAIN = 2.5  # times that the mean change counts
_WHO = "LocalMuon"
_BETAS = 0.9, 0.95  # of AdamW
# Of Newton-Schulz iterations: singular values from 0.013 of the bound on end at 0.7 to 1.2, also where each iteration
# has rounded them by 1.5 %, and smaller ones are multiplied by 64.
_COEFFICIENTS = (
    (6.9689, -18.2638, 12.1666),
    (3.0804, -2.6739, 0.6168),
    (3.0007, -3.3543, 1.1840),
)
_MIN_NORM = 1e-14  # of a product of a matrix with its transpose
_MAX_ROW_FACTOR = 2.0  # that a row of an update is multiplied by: one whose gradients have ended is to fade with them
_BATCH_NUMEL = 1 << 20  # elements of small matrices that are multiplied by one call
# Names of modules: wte, token_embedding, pos_embed; lm_head, classifier
_EMBEDDING = re.compile(r"(^|_)(un)?emb|^w[tp]e$|^positions?$")
_HEAD = re.compile(r"head$|^classifier$")


class Muon(torch.optim.Optimizer):
    """Muon: steps along the momentum of each matrix, made orthogonal, so that all directions count the same.

    The momentum is made orthogonal as by `torch.optim.Muon`, which PyTorch has since 2.9, to singular values in the
    same band, in three iterations in place of five. Then the rows, one for each output, are scaled to one norm, as in
    NorMuon, but by the norms of the update at hand, so that no state is kept; no row is more than doubled. Arrays of
    more dimensions, such as convolutions, are taken as matrices of their first dimension and the rest.

    Parameters
    ----------
    params : iterable
        Parameters of at least two dimensions, or groups of them.
    lr, weight_decay, momentum : float
        An update has singular values near 1, times the root of rows over columns where there are more rows. The weight
        decay is decoupled, and the momentum is Nesterov's. A group may have an ``"lr_ratio"``, which its rate is
        multiplied by.

    Raises
    ------
    ConfigurationError
        For a parameter that is no matrix, or is complex.

    References
    ----------
    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Li et al. 2025, arXiv 2510.05491 (NorMuon).

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.Conv2d(2, 3, 3)
    >>> optimizer = Muon([layer.weight])
    >>> layer(torch.ones(1, 2, 3, 3)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(self, params: Any, lr: float = LR, weight_decay: float = WEIGHT_DECAY, momentum: float = 0.95) -> None:
        _check_at_least_zero("Muon", lr=lr, weight_decay=weight_decay, momentum=momentum)
        if not momentum < 1:
            raise ConfigurationError(f"Muon: momentum must be at least 0 and below 1, got {momentum!r}")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "lr_ratio": 1.0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in param_group["params"]:
            if parameter.ndim < 2 or parameter.is_complex():
                self.param_groups.pop()
                kind = "complex" if parameter.is_complex() else f"of shape {tuple(parameter.shape)}"
                raise ConfigurationError(
                    f"Muon: parameters must be real and have two dimensions or more, got one that is {kind}; pass it "
                    "to torch.optim.AdamW"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, momentum = group["lr"] * group["lr_ratio"], group["momentum"]
            for batch in _batches(group["params"]):
                matrices = torch.stack([self._matrix(parameter, momentum) for parameter in batch])
                rate = lr * math.sqrt(max(1, matrices.size(1) / matrices.size(2)))
                for parameter, direction in zip(batch, equal_rows(orthogonalize(matrices)), strict=True):
                    whole = direction.view(parameter.shape)
                    step = from_whole(parameter, whole) if is_sharded(parameter) else whole
                    parameter.mul_(1 - lr * group["weight_decay"]).add_(step, alpha=-rate)
        return loss

    def _matrix(self, parameter: torch.Tensor, momentum: float) -> torch.Tensor:
        # The momentum to be made orthogonal, of all shards
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise ConfigurationError("Muon: gradients must be dense; leave out sparse=True")
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        update = gradient.lerp(state["momentum_buffer"].lerp_(gradient, 1 - momentum), momentum)
        whole: torch.Tensor = update.full_tensor() if is_sharded(update) else update  # type: ignore[attr-defined]
        return whole.flatten(1).to(_product_dtype(whole.device))


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices, of shape (batch, rows, columns), of the same singular vectors with singular values near 1.

    They are from 0.7 to 1.2 for those that are at least 0.013 of a bound on the largest one, the fourth root of the sum
    of their fourth powers, and 64 times as large a share of it for others. Products are of bfloat16 where the device
    has them. Others are float32, and those of iterations are of the shorter dimension where the other is twice as long.

    >>> import torch
    >>> wide = orthogonalize(torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0)))
    >>> bool(((torch.linalg.svdvals(wide.float()) - 1).abs() < 0.35).all())
    True
    """
    rows, columns = matrices.shape[1:]
    made = matrices.to(_product_dtype(matrices.device))

    def squared() -> torch.Tensor:
        return made @ made.mT if rows <= columns else made.mT @ made

    def multiplied(factor: torch.Tensor) -> torch.Tensor:
        return factor @ made if rows <= columns else made @ factor

    square, (first, *others) = squared(), _COEFFICIENTS
    norm = torch.linalg.vector_norm(square, dim=(1, 2), keepdim=True, dtype=torch.float32).clamp(min=_MIN_NORM)
    factor = _polynomial((square / norm).to(made.dtype), *first) * norm.rsqrt().to(made.dtype)
    if made.dtype != torch.float32 or max(rows, columns) < 2 * min(rows, columns):
        made = multiplied(factor)
        for coefficients in others:
            made = multiplied(_polynomial(squared(), *coefficients))
        return made
    product = factor
    for coefficients in others:
        square = factor @ square @ factor
        factor = _polynomial(square, *coefficients)
        product = factor @ product
    return multiplied(product)


def equal_rows(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices, of shape (batch, rows, columns), with rows of one norm, of those that need at most be doubled.

    >>> equal_rows(torch.tensor([[[4.0, 0.0], [0.0, 2.0], [0.0, 0.1]]])).norm(dim=2).mul(100).round()
    tensor([[258., 258.,  20.]])
    """
    norms = torch.linalg.vector_norm(matrices, dim=2, keepdim=True, dtype=torch.float32)
    norm = norms.square().mean(1, keepdim=True).sqrt()
    least = (norm / _MAX_ROW_FACTOR).clamp(min=_MIN_NORM)
    factors: torch.Tensor = norm / norms.maximum(least)
    return matrices * factors.to(matrices.dtype)


def _polynomial(square: torch.Tensor, a: float, b: float, c: float) -> torch.Tensor:
    """Return ``a I + b square + c square @ square``."""
    polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
    polynomial.diagonal(dim1=1, dim2=2).add_(a)
    return polynomial


def _batches(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    # Of one shape each, with gradients, in the same order on all ranks
    by_shape: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_shape.setdefault((parameter.shape, parameter.dtype, parameter.device), []).append(parameter)
    for same in by_shape.values():
        size = max(1, _BATCH_NUMEL // max(1, same[0].numel()))
        yield from (same[first : first + size] for first in range(0, len(same), size))


def _product_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where a device has products of it: a processor without them takes 5 to 40 times as long."""
    has_products: Callable[[], bool] = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)
    return torch.bfloat16 if device.type != "cpu" or has_products() else torch.float32


@check_arguments(_WHO, UpdateOptimizer, Reducer)
def LocalMuon(  # noqa: N802, a factory that reads like the class that it stands for
    named_parameters: NamedParameters,
    lr: float = LR,
    *,
    adamw_lr: float = ADAMW_LR,
    weight_decay: float = WEIGHT_DECAY,
    momentum: float = MOMENTUM,
    matrices: Collection[str] | None = None,
    sync_every: int | str = SYNC_EVERY,
    compressor: Compressor | str | Mapping[str, Any] | None = COMPRESSOR,
    warmup: int | str | None = 0,
    comm: Any = None,
    **settings: Any,
) -> Any:
    """Train with Muon on each rank, and exchange its changes in one bit an element every few steps.

    Muon steps hidden matrices, among them convolutions, flattened to output channels and the rest. Embeddings, heads
    and parameters of one dimension are stepped by AdamW, those of one dimension without weight decay. One
    `mpicomp.torch.UpdateOptimizer` is around both: it keeps the rest that one bit leaves out for later, and every rank
    continues from the same bits after each exchange. Muon's updates are orthogonal, so all of their elements are of
    about the same size, and a sign holds nearly all of it. Collective, as `UpdateOptimizer`.

    Parameters
    ----------
    named_parameters : torch.nn.Module, mapping or iterable of (str, torch.Tensor)
        The model, or ``model.named_parameters()``.
    lr, adamw_lr : float
        Rates of Muon and AdamW. The groups of both have AdamW's as ``"lr"``, and Muon steps by ``lr / adamw_lr`` times
        that, so that a scheduler, or a script that writes one rate to all groups, sets both.
    weight_decay, momentum : float
        The decoupled weight decay of both, and the momentum of Muon on each rank.
    matrices : collection of str, optional
        Names of all parameters that Muon steps. By default these have two dimensions or more, both larger than 1. Left
        to AdamW are weights of `torch.nn.Embedding` (where the model is passed), of modules named after an embedding,
        ``wte``, ``wpe``, ``head`` or ``classifier``, and the last matrix where no other has as many inputs as it has
        outputs.
    sync_every, compressor, warmup, comm, **settings
        See `mpicomp.torch.UpdateOptimizer`, which takes all of its other settings here, too. ``sync_every="auto"``
        chooses steps and bits together, by measured links. Defaults of its own are ``outer={"lr": sqrt(ranks)}``, at
        most 2.5, and ``feedback_decay=0.9``.

    Returns
    -------
    torch.optim.Optimizer
        The result of `mpicomp.torch.UpdateOptimizer` for ``[Muon(...), AdamW(...)]``. Of a group that is added
        later Muon takes ``{"params": ..., "optimizer": 0}``, and AdamW others.

    Raises
    ------
    ConfigurationError
        On all ranks: for parameters or settings that cannot be served, such as a model without hidden matrices.

    References
    ----------
    Thérien et al. 2025, arXiv 2505.23725 (MuLoCo); Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.

    Examples
    --------
    >>> import torch
    >>> from mpicomp.mpi import LocalWorld
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> optimizer = LocalMuon(model, comm=LocalWorld(1).transports[0])
    >>> [type(member).__name__ for member in optimizer.optimizers]
    ['Muon', 'AdamW']
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    """
    with connected(comm) as transport:

        def make() -> tuple[list[tuple[str, torch.Tensor]], CombinedOptimizer, dict[str, Any]]:
            ranks = transport.group.size
            pairs = named_pairs(named_parameters, _WHO, ranks)
            model = named_parameters if isinstance(named_parameters, torch.nn.Module) else None
            both = muon_and_adamw(pairs, model, lr, adamw_lr, weight_decay, matrices, momentum)
            return pairs, both, settings_of_changes(ranks, compressor, settings.get("feedback")) | settings

        pairs, both, settings = run_collectively(make, transport, _WHO)
        wrapped = UpdateOptimizer(both, pairs, sync_every, compressor, warmup=warmup, comm=transport, **settings)
        wrapped._mpicomp.owns_transport = transport is not comm
    return wrapped


def muon_and_adamw(
    pairs: Sequence[tuple[str, torch.Tensor]],
    model: torch.nn.Module | None = None,
    lr: float = LR,
    adamw_lr: float = ADAMW_LR,
    weight_decay: float = WEIGHT_DECAY,
    matrices: Collection[str] | None = None,
    momentum: float = MOMENTUM,
) -> CombinedOptimizer:
    """Return Muon for the named matrices, or for hidden ones, and AdamW for all other parameters."""
    _check_at_least_zero(_WHO, lr=lr, adamw_lr=adamw_lr, weight_decay=weight_decay)
    if not adamw_lr:
        raise ConfigurationError(f"{_WHO}: adamw_lr must be above 0, since that of Muon is kept as a ratio to it")
    names = {id(parameter): name_of(name) for name, parameter in reversed(pairs)}  # of tied ones the first
    parameters = {names.pop(id(parameter)): parameter for _, parameter in pairs if id(parameter) in names}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            check_kind(name, parameter, _WHO, takes_shards=True)
    chosen = set(hidden_matrices(parameters, model) if matrices is None else matrices)
    unknown = sorted(chosen - set(parameters))
    if unknown:
        raise ConfigurationError(
            f"{_WHO}: matrices has '{unknown[0]}', which is not among the {len(parameters)} parameters; pass names of "
            "model.named_parameters()"
        )
    if not chosen:
        raise ConfigurationError(
            f"{_WHO}: no parameter of {len(parameters)} is a hidden matrix, which Muon is for; name some in "
            "matrices, or wrap torch.optim.AdamW in mpicomp.torch.UpdateOptimizer"
        )
    of_muon = [parameter for name, parameter in parameters.items() if name in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        Muon([{"params": of_muon, "lr_ratio": lr / adamw_lr}], adamw_lr, weight_decay, momentum)
    ]
    others = [parameter for name, parameter in parameters.items() if name not in chosen]
    groups = [
        {"params": [parameter for parameter in others if (parameter.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, weight_decay), (False, 0.0))
    ]
    if others:
        optimizers.append(torch.optim.AdamW([group for group in groups if group["params"]], adamw_lr, _BETAS))
    return CombinedOptimizer(optimizers, _WHO)


def settings_of_changes(
    ranks: int, compressor: Compressor | str | Mapping[str, Any] | None, feedback: bool | None = None
) -> dict[str, Any]:
    """Return LocalMuon's settings of `UpdateOptimizer`: how far to move along the mean change, and residuals' decay.

    Noise of ranks' changes cancels in their mean, which is shorter than each of them, by up to the root of the ranks.

    >>> settings_of_changes(4, "onebit")
    {'outer': {'lr': 2.0}, 'feedback_decay': 0.9}
    """
    settings: dict[str, Any] = {"outer": {"lr": min(math.sqrt(ranks), _MAX_GAIN)}} if ranks > 1 else {}
    if compressor is not None and feedback is not False and get_compressor(compressor).feedback:
        settings["feedback_decay"] = FEEDBACK_DECAY
    return settings


def hidden_matrices(parameters: Mapping[str, torch.Tensor], model: torch.nn.Module | None) -> list[str]:
    """Return the names of matrices that are neither embeddings nor heads, by types, names and shapes."""
    embeddings = set()
    for name, module in () if model is None else model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            embeddings.add(id(module.weight))
            if module.sparse:
                raise ConfigurationError(
                    f"{_WHO}: '{name or 'the model'}' has sparse=True, and AdamW takes dense gradients; leave it out"
                )
    matrices = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.ndim > 1
        and min(len(parameter), math.prod(parameter.shape[1:])) > 1
        and parameter.is_floating_point()
        and id(parameter) not in embeddings
        and not _EMBEDDING.search(_module_of(name))
    }
    hidden = [name for name in matrices if not _HEAD.search(_module_of(name))]
    if hidden and hidden[-1] == next(reversed(matrices)):
        outputs = matrices[hidden[-1]].size(0)
        if all(outputs != matrix.size(1) for matrix in matrices.values()):
            hidden.pop()
    return hidden


def muon_seconds(matrices: Sequence[torch.Tensor]) -> float:
    """Return the seconds that Muon's step takes for some matrices, of a core or a GPU, by those of the largest one."""

    def work(matrix: torch.Tensor) -> float:
        rows, columns = sorted((len(matrix), math.prod(matrix.shape[1:])))
        return float(rows * rows * columns)

    if not matrices:
        return 0.0
    largest = local_of(max(matrices, key=work)).detach().flatten(1)
    clock = time.thread_time if largest.device.type == "cpu" else time.perf_counter
    seconds = []
    for _ in range(3):  # the first one warms up
        begin = clock()
        orthogonalize(largest[None]).sum().item()  # waits for a GPU
        seconds.append(clock() - begin)
    return min(seconds) * sum(map(work, matrices)) / work(largest)


def _module_of(name: str) -> str:
    """Return the name of a weight's module, after that of its container where it is a number."""
    *parents, last = name.lower().removesuffix(".weight").split(".")
    return f"{parents[-1]}.{last}" if parents and last.isdigit() else last


def _check_at_least_zero(subsystem: str, **settings: float) -> None:
    for name, value in settings.items():
        if not check_kind_of_setting(subsystem, name, value, (float,)) >= 0:
            raise ConfigurationError(f"{subsystem}: {name} must be at least 0, got {value!r}")
