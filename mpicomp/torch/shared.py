"""Parameters that all ranks share, and the exchange of each rank's changes of its copy."""

from collections.abc import Mapping
from typing import Any

import torch

from mpicomp.arrays import ArraySpec, as_kind_of
from mpicomp.errors import ConfigurationError
from mpicomp.mpi.rounds import Rounds
from mpicomp.reducer import Reducer
from mpicomp.reducer.agreement import Checks, GradientInput, Signature, agree
from mpicomp.torch.checks import BROADCAST_ADVICE, Fingerprint, SettingsCheck, check_same, sample_of, sum_of_bits
from mpicomp.torch.parameters import as_real
from mpicomp.torch.shards import ShardGroup, exchanged, spec_of
from mpicomp.torch.states import to_arrays

_WHO = "UpdateOptimizer"
_SWAPPED_NUMEL = 1 << 20  # elements that trade places at once


class SharedParameters(Checks):
    """Some parameters of a model, and their shared values, which are the same bits on all ranks.

    Each rank's parameters leave the shared values as its optimizer steps. An exchange moves the shared values by the
    mean of all ranks' changes, which is the gradient of a `torch.optim.SGD` with settings ``outer``, if any; then the
    parameters become equal to them again.

    The shared values lie in the reducer's buckets. An exchange moves them to the parameters, so that the changes take
    their place there, and no array is needed but the residual. With momentum in ``outer``, which keeps their places,
    and where a step may be repeated after a death, they have memory of their own; so have those of 16-bit parameters.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: Mapping[str, torch.Tensor],
        settings: dict[str, Any],
        optimizer: torch.optim.Optimizer,
        outer: Mapping[str, Any] | None = None,
        compare_every: int = 0,
        same_batches: bool = False,
    ) -> None:
        self.reducer = reducer
        self.fresh = True  # parameters equal the shared values: no step was made since the last exchange
        # float32 for 16 bits, pairs of reals for complex ones; without parameters that never required a gradient.
        self.values: dict[str, torch.Tensor] = {}
        self._fingerprint = Fingerprint(compare_every, _WHO, same_batches)
        self._settings_check = SettingsCheck(optimizer, _WHO)
        self._settings = settings
        self._parameters: dict[str, torch.Tensor] = {}
        self.shards = ShardGroup(map(exchanged, parameters.values()))
        self._versions: dict[str, int] = {}
        self._compared = self._enabling_join = False
        self._scale = 1.0
        self._changes: dict[str, torch.Tensor] = {}  # of the exchange under way
        self._views: dict[str, torch.Tensor] = {}  # memory in buckets for changes of 16-bit parameters
        self._bits_of_changes: list[torch.Tensor] = []  # a checksum, where batches of ranks are compared
        outer = None if outer is None else dict(outer)
        self._takes_sign = bool(outer and outer.pop("sign", False))
        self._outer_settings = outer
        self._has_momentum = bool(outer and outer.get("momentum"))
        reducer.layout.holds_gradients = not self._has_momentum and not reducer.deaths.survives
        self._outer: torch.optim.SGD | None = None
        self._momenta: dict[str, torch.Tensor] = {}  # loaded, of the outer optimizer, until it is made
        self.add(parameters)

    def add(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Add parameters, on all ranks, between exchanges."""
        self._parameters |= {name: exchanged(parameter) for name, parameter in parameters.items()}
        self._share_trained()

    def shared(self) -> dict[str, torch.Tensor]:
        """Return the shared values, complex ones as such."""
        return {
            name: torch.view_as_complex(shared) if self._parameters[name].is_complex() else shared
            for name, shared in self.values.items()
        }

    @torch.no_grad()
    def copy_written(self) -> None:
        """Copy writes of a script since the last exchange to the shared values; the next exchange compares ranks."""
        if not self.fresh:
            return
        for name, shared in self.values.items():
            values = as_real(self._parameters[name])
            expected = sample_of(shared).to(values.dtype)
            if values._version != self._versions[name] or not torch.equal(sample_of(values), expected):
                if not torch.equal(values, shared.to(values.dtype)):
                    shared.copy_(values)
                    self._compared = False
                self._versions[name] = values._version
        self.fresh = False

    def enable_join(self) -> Rounds[None]:
        """Check that all ranks may run out of batches from now on."""
        self._settings |= {"join()": True}
        self._enabling_join = self.stale = True
        try:
            yield from self.reducer.rounds(self.values, checks=self)
        finally:
            self._enabling_join = False

    def set_active(self, active: int, idle: bool) -> None:
        """Average over the ``active`` ranks that have batches from now on."""
        ranks = self.reducer.transport.group.size
        self._scale, self.frozen, self.idle = ranks / active, active < ranks, idle

    def leave_join(self) -> None:
        self._settings.pop("join()", None)
        self._scale, self.frozen, self.idle = 1.0, False, False

    def exchange_changes(self, lr: float | None) -> Rounds[None]:
        """Exchange changes and apply them; after a failure the parameters equal the shared values, unmoved."""
        yield from self._prepare()
        with torch.no_grad():
            self._changes = {name: self._change(name) for name in self.values}
        compares = self._fingerprint.needs_gradients and not self.frozen
        self._bits_of_changes = [torch.tensor([sum_of_bits(self._changes.values())])] if compares else []
        means = yield from self._averaged(lr)
        with torch.no_grad():
            self._move(means, lr)
        self._restore()

    def agree(self, given: GradientInput) -> Rounds[GradientInput | None]:
        specs = [
            ArraySpec(name, spec_of(name, self._parameters[name]).dtype, tuple(shared.shape))
            for name, shared in self.values.items()
        ]
        group = self.reducer.transport.group
        settings = {"join()": False} | self._settings
        yield from agree(Signature(settings, specs), None, group, _WHO)
        if self._enabling_join:
            return None
        if not self.frozen:
            yield from self._settings_check.compare(group)
        advice = f"{BROADCAST_ADVICE}, and write the same to parameters on all ranks between steps"
        yield from check_same(self._exchanged_values(), group, _WHO, advice)
        self._compared = True
        return given

    @torch.no_grad()
    def laid_out(self) -> None:
        layout, self._views = self.reducer.layout, {}
        for name, change in self._changes.items():
            memory = layout.gradient(name)
            if memory is None or change.device.type not in ("cpu", "cuda"):
                continue
            view = as_kind_of(change, memory)
            if view.device == change.device:  # without CuPy, buckets of parameters on a GPU are on the host
                self._changes[name] = view.copy_(change)
                if self._is_swapped(name):
                    self.values[name] = view
                else:
                    self._views[name] = view

    def finish(self, finite: bool) -> Rounds[bool]:
        group = self.reducer.transport.group
        yield from self._fingerprint.compare(self._exchanged_values(), group, self._bits_of_changes)
        yield from self._settings_check.finish(group)
        return self.shards.agree_finite(finite)

    def restart(self) -> None:
        self._fingerprint.restart()
        self._settings_check.restart()
        self._compared, self.stale = False, True

    def trained(self) -> dict[str, torch.Tensor]:
        """Return the shared parameters, sharded ones as `LocalShard`."""
        return {name: self._parameters[name] for name in self.values}

    def state_dict(self) -> dict[str, Any]:
        momenta = self._momenta
        if self._outer is not None:
            states = {name: self._outer.state.get(shared, {}) for name, shared in self.values.items()}
            found = {name: state.get("momentum_buffer") for name, state in states.items()}
            momenta = {name: momentum.clone() for name, momentum in found.items() if momentum is not None}
        return {
            "reducer": self.reducer.state_dict(),
            "shared": {name: shared.clone() for name, shared in self.values.items()},
            "fresh": self.fresh,
            "outer": momenta,
        }

    def check_fits(self, state: Mapping[str, Any]) -> None:
        shapes = {name: tuple(shared.shape) for name, shared in self.values.items()}
        loaded = {name: tuple(shared.shape) for name, shared in state["shared"].items()}
        for name in [*shapes, *loaded]:
            if shapes.get(name) != loaded.get(name):
                raise ConfigurationError(
                    f"{_WHO}: the state is of another model: parameter '{name}' has shape {loaded.get(name, 'none')} "
                    f"in it and {shapes.get(name, 'none')} here; delete state['mpicomp'] to begin with the model's "
                    "parameters"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; not collective."""
        self.reducer.load_state_dict(to_arrays(state["reducer"]))
        for name, shared in self.values.items():
            shared.copy_(state["shared"][name])
            self._versions[name] = self._parameters[name]._version
        self.fresh = bool(state["fresh"])
        self._compared = False
        self._outer, self._momenta = None, dict(state["outer"])

    @torch.no_grad()
    def drop_loaded_state(self) -> None:
        """Continue from the model's parameters, without residuals and without momentum of the outer optimizer."""
        self.reducer.drop_loaded_state()
        for name, shared in self.values.items():
            shared.copy_(as_real(self._parameters[name]))
            self._versions[name] = self._parameters[name]._version
        self.fresh, self._compared, self._outer, self._momenta = True, False, None, {}

    def _share_trained(self) -> None:
        for name, parameter in self._parameters.items():
            if (parameter.requires_grad or parameter.grad is not None) and name not in self.values:
                real = as_real(parameter.detach())
                dtype = torch.float32 if real.dtype in (torch.float16, torch.bfloat16) else real.dtype
                self.values[name] = real.to(dtype, copy=True)
                self._versions[name] = parameter._version
                self._compared = False
                if self._outer is not None:
                    self._outer.add_param_group({"params": [self.values[name]]})

    def _prepare(self) -> Rounds[None]:
        self._share_trained()
        self.stale = not self._compared
        if not self.frozen and (yield from self._settings_check.begin(self.reducer.transport.group)):
            self.stale = True

    def _is_swapped(self, name: str) -> bool:
        """Return whether a parameter holds its shared values during an exchange, whose memory holds the change."""
        is_same = as_real(self._parameters[name]).dtype == self.values[name].dtype
        return self.reducer.layout.holds_gradients and is_same

    def _exchanged_values(self) -> dict[str, torch.Tensor]:
        """Return the shared values during an exchange."""
        return {
            name: as_real(self._parameters[name].detach()) if self._is_swapped(name) else shared
            for name, shared in self.values.items()
        }

    def _change(self, name: str) -> torch.Tensor:
        # In the dtype of its shared values, and in memory that is there where dtypes are equal.
        values, shared = as_real(self._parameters[name].detach()), self.values[name]
        if self._is_swapped(name):
            count = 1 + shared.numel() // _SWAPPED_NUMEL
            parts = ((tensor if tensor.ndim else tensor.view(1)).chunk(count) for tensor in (values, shared))
            for value, kept in zip(*parts, strict=True):
                change = value - kept
                value.copy_(kept)
                kept.copy_(change)
            return shared
        if values.dtype == shared.dtype:
            return values.sub_(shared)
        change = self._views[name] if name in self._views else torch.empty_like(shared)
        return change.copy_(values).sub_(shared.to(values.dtype))  # parameters began as the rounded shared values

    def _averaged(self, lr: float | None) -> Rounds[Any]:
        absent = list(self._changes) if self.idle else []
        self.shards.begin()
        try:
            return (yield from self.reducer.rounds(self._changes, lr, absent=absent, scale=self._scale, checks=self))
        except BaseException as error:
            self._restore()
            self.shards.fail(error)
            raise

    def _move(self, means: Mapping[str, torch.Tensor], lr: Any) -> None:
        record = self.reducer.last_step
        if record is not None and record.skipped:
            return
        values = self._exchanged_values()
        if not self._has_momentum:  # one parameter at a time: a copy of no more than one lives
            outer = {"lr": 1.0} if self._outer_settings is None else self._outer_settings
            rate, decay = outer.get("lr", 1e-3), outer.get("weight_decay", 0)
            for name, mean in means.items():
                step = mean.sign().mul_(lr) if self._takes_sign else mean
                values[name].add_(step.sub(values[name], alpha=decay) if decay else step, alpha=rate)
            return
        if self._outer is None:
            # The mean change is added, as in ascent.
            self._outer = torch.optim.SGD(
                [{"params": [shared]} for shared in self.values.values()], **(self._outer_settings or {}), maximize=True
            )
            for name, momentum in self._momenta.items():
                self._outer.state[self.values[name]]["momentum_buffer"] = momentum.to(self.values[name], copy=True)
            self._momenta = {}
        for name, mean in means.items():
            self.values[name].grad = mean
        self._outer.step()
        for shared in self.values.values():
            shared.grad = None

    @torch.no_grad()
    def _restore(self) -> None:
        for name, shared in self.values.items():
            if self._changes and self._is_swapped(name):
                shared.copy_(as_real(self._parameters[name]))
            else:
                as_real(self._parameters[name]).copy_(shared)
            self._versions[name] = self._parameters[name]._version
        self._changes, self.fresh = {}, True
