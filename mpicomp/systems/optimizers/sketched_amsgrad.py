"""SketchedAMSGrad: ranks exchange their momenta by a sketch, which finds those that move parameters most.

**The paper** (arXiv 2210.07454, with SketchedSGD, Ivkin et al. 2019, arXiv 1903.04488). Each rank keeps a momentum
``m`` of its own gradients, and a memory ``e``. A step is ``S = sum of sketch(m + lr_before / lr * e)``, ``v = b2 v + (1
- b2) h**2``, ``vhat = max(vhat, v)``, ``delta = top-k(estimate(S) / sqrt(vhat))``.

**Here** there is no second form; the paper leaves open, or has otherwise:

- The memory holds ``lr * e``, so that no step divides by a learning rate that may be 0. It is the same.
- ``h`` is what is delivered, over the learning rate, and 0 elsewhere. What waited at a higher rate counts for more in
  ``v`` once the rate has fallen, as it does in the paper's sum.
- The sketch holds values that are already divided by ``sqrt(vhat)``: the error of an estimate is about the same for all
  elements, and a division by a small root afterwards would choose that element always.
- That ``vhat`` is the one of the step before, since ``h`` is known only with the positions; what is delivered is
  divided by the ``vhat`` that contains it.
- Exact sums of all positions that were looked at are delivered, by the second round of SketchedSGD. The memory loses
  what was sent before the division, so that nothing is lost.
- The bias of ``v`` is corrected as in Adam: the first steps would be thirty times too long otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from mpicomp.algorithms.countsketch import CountSketch
from mpicomp.compressors import Context
from mpicomp.compressors.base_compressor import BucketParameters
from mpicomp.errors import ConfigurationError
from mpicomp.reducer import Reducer
from mpicomp.rounds import Rounds
from mpicomp.torch.arguments import as_real
from mpicomp.torch.collective_optimizer import CollectiveOptimizer, Params, check_adam_settings, gradient_of


class SketchedAMSGrad(CollectiveOptimizer):
    """AMSGrad whose ranks exchange sketches of their momenta.

    ``lr * m`` of each rank's momentum ``m`` is exchanged by `mpicomp.CountSketch` with error feedback, over the
    collective ``sketched``: all ranks find the positions where the sum over ``sqrt(vhat)`` is large from its sketch,
    and receive the exact sums there. These move parameters and update the variance. The bytes that leave a rank do not
    grow with the number of ranks. Parameters stay the same bits on every rank.

    Creating one and ``step`` are collective: all ranks step together. A parameter without a gradient takes part with
    zeros. ``.grad`` is left as it is: clip it on each rank before the step.

    Parameters
    ----------
    params : iterable or torch.nn.Module
        ``model.named_parameters()``, the model, parameters, or parameter groups. Complex parameters count as pairs of
        reals.
    lr, betas, weight_decay
        As those of `torch.optim.Adam`: the weight decay is added to the gradient.
    eps : float
        First value of ``vhat``, above 0. It stands under the root: at 1e-8 momenta are divided by at least 1e-4.
    compressor : CountSketch or None
        Size of the table, and share that is delivered. None: the defaults of `mpicomp.CountSketch`.
    comm : mpi4py.MPI.Comm, Transport or None
        A communicator is duplicated. None stands for MPI.COMM_WORLD.
    same_batches : bool
        Whether ranks are meant to draw the same batches: otherwise there is a warning.

    Attributes
    ----------
    reducer : Reducer
        It has ``last_step``, and ``residual(name)``, the part of ``lr * m`` that was not sent.

    Raises
    ------
    ConfigurationError
        For a setting that is not allowed.
    DisagreementError
        From ``step``, on all ranks, where settings or parameters differ.
    NonFiniteError
        From ``step``, on all ranks, where some rank's gradient is not finite; nothing was changed then.

    Notes
    -----
    Each rank has its own state: momenta differ between ranks, and ``state_dict()`` has the residuals under
    ``"mpicomp"``. With it training continues as if it had never stopped, bit for bit where MPI's sums are.

    Examples
    --------
    >>> import torch
    >>> from mpicomp.transport import LocalWorld
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = SketchedAMSGrad(model.named_parameters(), comm=LocalWorld(1).transports[0])
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.reducer.last_step.buckets[0].collective
    'sketched'
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        compressor: CountSketch | None = None,
        comm: Any = None,
        same_batches: bool = False,
    ) -> None:
        chosen = CountSketch() if compressor is None else compressor

        def check() -> None:
            if not isinstance(chosen, CountSketch) or chosen.momentum:
                raise ConfigurationError(
                    f"SketchedAMSGrad: compressor must be a CountSketch without momentum, got {chosen!r}; momentum is "
                    "betas[0]"
                )
            check_adam_settings("SketchedAMSGrad", betas, lr=lr, weight_decay=weight_decay)
            if not eps > 0:
                raise ConfigurationError(
                    f"SketchedAMSGrad: eps must be above 0, got {eps!r}; the variance begins at it"
                )

        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, check, comm, same_batches)
        preconditioned = _Preconditioned(**_settings(chosen), variance_of=self._variance_of)
        self.reducers = {"sketched": Reducer(preconditioned, "sketched", comm=self._transport)}

    @property
    def reducer(self) -> Reducer:
        """The reducer that exchanges momenta."""
        return self.reducers["sketched"]

    def rounds(self) -> Rounds[None]:
        """Make a step as a generator of rounds."""
        members = list(self._members())
        momenta, steps = {}, {}
        for name, parameter, group in members:
            state, values = self.state[parameter], as_real(parameter)
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(values), torch.zeros_like(values)
                state["max_exp_avg_sq"] = torch.full_like(values, group["eps"])
            gradient = gradient_of(parameter, group["weight_decay"])
            momenta[name] = torch.lerp(state["exp_avg"], gradient, 1 - group["betas"][0])
            steps[name] = momenta[name] * group["lr"]
        means = yield from self._exchange(self.reducer, steps, float(self.param_groups[0]["lr"]))
        self.steps += 1
        for name, parameter, group in members:
            state, delivered = self.state[parameter], means[name]
            state["step"] += 1
            state["exp_avg"].copy_(momenta[name])
            if group["lr"]:
                # Every product and sum is rounded by itself: ranks choose positions by what comes out.
                beta2 = group["betas"][1]
                square = delivered.div(group["lr"]).square_().mul_(1 - beta2)
                state["exp_avg_sq"].mul_(beta2).add_(square)
                corrected = state["exp_avg_sq"] / (1 - beta2 ** float(state["step"]))
                torch.maximum(state["max_exp_avg_sq"], corrected, out=state["max_exp_avg_sq"])
            as_real(parameter).sub_(delivered / state["max_exp_avg_sq"].sqrt())

    def _variance_of(self, name: str) -> torch.Tensor:
        """Return the values that the squares of a parameter's momenta are compared to."""
        parameter = next(parameter for parameter, known in self._names.items() if known == name)
        variance: torch.Tensor = self.state[parameter]["max_exp_avg_sq"]
        return variance


@dataclass(frozen=True, repr=False)
class _Preconditioned(CountSketch):
    """A count sketch of arrays over the roots of variances, which it finds by the names of parameters."""

    variance_of: Callable[[str], torch.Tensor] = field(kw_only=True)
    names: tuple[str, ...] = field(default=(), kw_only=True)

    def bind_to(self, bucket: BucketParameters) -> Self:
        return replace(self, names=tuple(bucket.names))

    def get_config(self) -> dict[str, Any]:
        return {"id": self.id} | _settings(self)

    def weights(self, context: Context) -> NDArray[np.floating]:
        parts = []
        for name in self.names:
            variance = self.variance_of(name)
            wide = torch.float64 if variance.dtype == torch.float64 else torch.float32
            parts.append(variance.detach().to("cpu", wide).numpy().reshape(-1))
        weights = context.workspace.array("weights", sum(part.size for part in parts), parts[0].dtype)
        np.concatenate(parts, out=weights)
        np.sqrt(weights, out=weights)
        np.divide(1, weights, out=weights)
        return weights


def _settings(compressor: CountSketch) -> dict[str, Any]:
    names = ("ratio", "rows", "columns", "candidates", "momentum", "wire")
    return {name: getattr(compressor, name) for name in names}
