"""Adam that exchanges one bit an element once its variance is known."""

from typing import Any

import torch

from mpicomp.compressors import Dense, OneBit
from mpicomp.errors import ConfigurationError
from mpicomp.reducer import Reducer
from mpicomp.rounds import Rounds
from mpicomp.torch.arguments import as_real
from mpicomp.torch.collective_optimizer import CollectiveOptimizer, Params, check_adam_settings, gradient_of

_LEAST_VARIANCE = 0.01  # as a share of the median: so one bit cannot move an element far


class OneBitAdam(CollectiveOptimizer):
    """1-bit Adam: momenta are exchanged in place of gradients, as signs.

    For ``warmup_steps`` steps it is Adam on gradients averaged in full. Then the variance is frozen: each rank adds its
    gradient to the momentum, and the momenta are averaged by the collective ``two-phase`` with `mpicomp.OneBit` and
    error feedback, about two bits an element.

    Creating one and ``step`` are collective. A parameter without a gradient counts as zeros. ``.grad`` is unchanged:
    clip it on each rank before the step.

    Parameters
    ----------
    params : iterable or torch.nn.Module
        ``model.named_parameters()``, the model, parameters, or parameter groups. Complex parameters count as pairs of
        reals.
    lr, betas, eps, weight_decay
        See `torch.optim.Adam`: the weight decay is added to the gradient.
    warmup_steps : int
        At least 1. The paper takes 15 to 25 % of all steps, until the size of gradients is stable.
    comm : mpi4py.MPI.Comm, Transport or None
        None stands for MPI.COMM_WORLD.
    same_batches : bool
        Whether ranks are meant to draw the same batches: else there is a warning.

    Attributes
    ----------
    reducer : Reducer
        The one of the last step; after the warm-up its residuals are of momenta.

    Raises
    ------
    ConfigurationError
        For an impossible setting.
    DisagreementError
        From ``step``, on all ranks, where settings or parameters differ.
    NonFiniteError
        From ``step``, on all ranks, where some rank's gradient is not finite; nothing was changed then.

    Notes
    -----
    The bias of both moments is corrected as in Adam: after 100 steps an uncorrected variance would be a tenth of the
    true one when it is frozen. The paper has no correction, and longer warm-ups.

    A sign stands for the mean magnitude of its block even where an element's momentum is nearly zero. So the frozen
    variance of an element is at least a hundredth of its parameter's median, and the median where the element has had
    no gradient. A parameter without any gradient in the warm-up stays as it is.

    Residuals are in units of the momentum. ``state_dict()`` has this rank's under ``"mpicomp"``: with it training
    resumes bit for bit.

    References
    ----------
    Tang et al. 2021, arXiv 2102.02888.

    Examples
    --------
    >>> import torch
    >>> from mpicomp.transport import LocalWorld
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = OneBitAdam(model.named_parameters(), warmup_steps=1, comm=LocalWorld(1).transports[0])
    >>> for _ in range(2):
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> optimizer.reducer.last_step.buckets[0].collective
    'two-phase'
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 100,
        comm: Any = None,
        same_batches: bool = False,
    ) -> None:
        def check() -> None:
            if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 1:
                raise ConfigurationError(
                    f"OneBitAdam: warmup_steps must be at least 1, got {warmup_steps!r}; without a warm-up there is no "
                    "variance to divide by"
                )
            check_adam_settings("OneBitAdam", betas, lr=lr, eps=eps, weight_decay=weight_decay)

        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, check, comm, same_batches)
        self._warmup_steps = warmup_steps
        self.reducers = {
            "warmup": Reducer(Dense(), "scatter-reduce", comm=self._transport),
            "compressed": Reducer(OneBit(), "two-phase", comm=self._transport),
        }

    @property
    def reducer(self) -> Reducer:
        return self.reducers["warmup" if self.steps <= self._warmup_steps else "compressed"]

    def rounds(self) -> Rounds[None]:
        if self.steps < self._warmup_steps:
            yield from self._warmup_step()
            if self.steps == self._warmup_steps:
                self._freeze()
        else:
            yield from self._step_compressed()

    def _warmup_step(self) -> Rounds[None]:
        members = list(self._members())
        gradients = {name: gradient_of(parameter) for name, parameter, _ in members}
        means = yield from self._exchange(self.reducers["warmup"], gradients, self._lr)
        self.steps += 1
        for name, parameter, group in members:
            state, values = self.state[parameter], as_real(parameter)
            if not state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(values), torch.zeros_like(values)
            gradient = means[name]
            if group["weight_decay"]:
                gradient = gradient.add(values, alpha=group["weight_decay"])
            beta1, beta2 = group["betas"]
            state["exp_avg"].lerp_(gradient, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            deviation = state["exp_avg_sq"].sqrt().div_((1 - beta2**self.steps) ** 0.5).add_(group["eps"])
            values.addcdiv_(state["exp_avg"], deviation, value=-self._corrected_lr(group))

    def _freeze(self) -> None:
        """Replace variances by the divisors of momenta."""
        for _, parameter, group in self._members():
            state = self.state[parameter]
            variance = state.pop("exp_avg_sq").div_(1 - group["betas"][1] ** self.steps)
            positive = variance[variance > 0]
            if positive.numel() == 0:
                state["deviation"] = torch.full_like(variance, torch.inf)
                continue
            median = positive.median()  # one of the numbers: no rank rounds it differently
            variance = torch.where(variance > 0, variance.clamp_(min=_LEAST_VARIANCE * median), median)
            state["deviation"] = variance.sqrt_().add_(group["eps"])

    def _step_compressed(self) -> Rounds[None]:
        members = list(self._members())
        momenta = {}
        for name, parameter, group in members:
            state = self.state[parameter]
            if "deviation" not in state:
                raise ConfigurationError(
                    f"OneBitAdam: '{name}' was not trained in the warm-up and has no variance; parameters that come "
                    "later need a new optimizer"
                )
            gradient = gradient_of(parameter, group["weight_decay"])
            momenta[name] = torch.lerp(state["exp_avg"], gradient, 1 - group["betas"][0])
        means = yield from self._exchange(self.reducers["compressed"], momenta, self._lr)
        self.steps += 1
        for name, parameter, group in members:
            state = self.state[parameter]
            state["exp_avg"].copy_(means[name])
            as_real(parameter).addcdiv_(state["exp_avg"], state["deviation"], value=-self._corrected_lr(group))

    @property
    def _lr(self) -> float:
        return float(self.param_groups[0]["lr"])

    def _corrected_lr(self, group: dict[str, Any]) -> float:
        """Return the learning rate with Adam's correction of the momentum's bias."""
        lr: float = float(group["lr"]) / (1 - group["betas"][0] ** self.steps)
        return lr
