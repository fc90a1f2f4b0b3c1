"""An optimizer whose gradients are averaged over MPI ranks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mpicomp.compressors import Compressor, get_compressor
from mpicomp.errors import ConfigurationError
from mpicomp.reducer import Reducer


def DistributedOptimizer(  # noqa: N802, a factory that reads like the class that it stands for
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    compressor: Compressor | str | Mapping[str, Any] | None = None,
    collective: str = "auto",
    policy: str | None = None,
    *,
    feedback: bool | None = None,
    nonfinite: str = "raise",
    comm: Any = None,
    **settings: Any,
) -> Any:
    """Make an optimizer average its gradients over the ranks, compressed, before every step.

    Collective over ``comm``, as are the steps of what it returns: all ranks step together. A parameter without a
    gradient takes part with zeros, so that all ranks exchange the same arrays whatever their batches touched.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any optimizer that reads gradients once a step. LBFGS, which calls for them many times, is refused.
    named_parameters : iterable of (str, torch.Tensor)
        ``model.named_parameters()``: every parameter of the optimizer that requires a gradient has to be among
        them. Parameters that are in no group of the optimizer are left out.
    compressor, collective, policy, feedback, nonfinite, comm
        See `mpicomp.Reducer`.
    **settings
        Further settings of `mpicomp.Reducer`.

    Returns
    -------
    torch.optim.Optimizer
        The same optimizer, as an object of a class derived from its own: it shares groups and state with the one
        passed, so learning-rate schedulers and ``state_dict`` work as before. It has ``reducer``, a `mpicomp.Reducer`;
        ``synchronize()``, which averages the gradients now, so that they can be clipped before ``step()``; and
        ``close()``.

    Raises
    ------
    ConfigurationError
        For an optimizer or parameters that cannot be served.

    Examples
    --------
    >>> import torch
    >>> from mpicomp.transport import LocalWorld
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = DistributedOptimizer(
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     named_parameters=model.named_parameters(),
    ...     compressor="topk",
    ...     comm=LocalWorld(1).transports[0],
    ... )
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> isinstance(optimizer, torch.optim.SGD), optimizer.reducer.last_step.buckets[0].collective
    (True, 'allgather')
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"DistributedOptimizer: a torch optimizer is needed, got {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        raise ConfigurationError("DistributedOptimizer: this optimizer is distributed already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "DistributedOptimizer: LBFGS asks for gradients many times in a step and cannot be served; use SGD or Adam"
        )
    if compressor is not None:
        compressor = get_compressor(compressor)
        own = [group["momentum"] for group in optimizer.param_groups if group.get("momentum")]
        if compressor.entry.momentum and own:
            raise ConfigurationError(
                f"DistributedOptimizer: {compressor!r} applies momentum before the exchange, and the optimizer would "
                f"apply its own, {own[0]}, once more; set momentum=0 in one of them"
            )
    parameters = _parameters(optimizer, named_parameters)
    reducer = Reducer(compressor, collective, policy, feedback, nonfinite, comm, **settings)
    base = type(optimizer)
    wrapped: Any = object.__new__(type(f"Distributed{base.__name__}", (_Distributed, base), {}))
    wrapped.__dict__ = optimizer.__dict__
    wrapped.reducer = reducer
    wrapped._mpicomp_parameters = parameters
    wrapped._mpicomp_synchronized = False
    return wrapped


class _Distributed:
    """What `DistributedOptimizer` puts in front of an optimizer's class."""

    # A GradScaler leaves step() out where this rank's gradients overflowed, and the others would wait for it. With this
    # it calls step() on all of them, after it has set ``found_inf``.
    _step_supports_amp_scaling = True

    reducer: Reducer
    param_groups: list[dict[str, Any]]
    _mpicomp_parameters: dict[str, torch.Tensor]
    _mpicomp_synchronized: bool

    def synchronize(self) -> None:
        """Average the gradients over the ranks now; the next ``step()`` does not do it again. Collective."""
        with torch.no_grad():
            gradients = {
                name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for name, parameter in self._mpicomp_parameters.items()
            }
            lr = self.param_groups[0].get("lr")
            means = self.reducer.reduce(gradients, lr=None if lr is None else float(lr))
            for name, parameter in self._mpicomp_parameters.items():
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(means[name])
        self._mpicomp_synchronized = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients over the ranks, then step. Collective.

        A closure is called once, before the gradients are averaged, and its value is given back.
        """
        if hasattr(self, "found_inf"):
            raise ConfigurationError(
                "DistributedOptimizer: gradients that a GradScaler has scaled cannot be averaged yet; use "
                "torch.autocast with bfloat16, which needs no scaler"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._mpicomp_synchronized = False
        if not self._mpicomp_synchronized:
            self.synchronize()
        self._mpicomp_synchronized = False
        super().step()  # type: ignore[misc]
        return loss

    def close(self) -> None:
        """Give back what the reducer holds of MPI. Collective."""
        self.reducer.close()


def _parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Give the parameters that are exchanged, by name, in the order of the model."""
    named = list(named_parameters)
    ours = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    chosen: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, parameter in named:
        if name in chosen:
            raise ConfigurationError(f"DistributedOptimizer: two parameters are named '{name}'; names must differ")
        if id(parameter) in ours and id(parameter) not in seen and parameter.requires_grad:
            chosen[name] = parameter
            seen.add(id(parameter))
    missing = [parameter for key, parameter in ours.items() if parameter.requires_grad and key not in seen]
    if missing:
        raise ConfigurationError(
            f"DistributedOptimizer: {len(missing)} parameters of the optimizer have no name, the first of shape "
            f"{tuple(missing[0].shape)}; pass named_parameters=model.named_parameters() of the same model"
        )
    if not chosen:
        raise ConfigurationError("DistributedOptimizer: no parameter requires a gradient")
    return chosen
