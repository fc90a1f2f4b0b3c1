"""The parts of a reducer and its state, which the steps work on."""

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpicomp.arrays import SpecCache
from mpicomp.compressors.base_compressor import Entry
from mpicomp.cost import CostModel
from mpicomp.device import HOST, Device
from mpicomp.errors import ConfigurationError, RankFailedError
from mpicomp.policies import Plan, Policy
from mpicomp.reducer.layout import Layout
from mpicomp.reducer.pace import Pace
from mpicomp.reducer.record import StepRecord, Tally
from mpicomp.reducer.telemetry import Telemetry
from mpicomp.transport import Transport
from mpicomp.transport.staging import Staging

_numbers = itertools.count()


@dataclass(frozen=True)
class Loaded:
    """A state that was loaded; it is taken up when the ranks have compared their steps, at the next one."""

    step: int
    policy: Mapping[str, Any]
    cost: CostModel | None


@dataclass
class Core:
    """The parts of a reducer: settings, layout, policy, transport, telemetry, and the state between steps.

    Attributes
    ----------
    settings : dict
        Settings that have to be the same on all ranks.
    nonfinite : str
        Setting for gradients that are not finite.
    seed : int
        For schemes that draw random numbers.
    entry : Entry
        Clipping and momentum that are applied to gradients first.
    layout : Layout
        Arrays and residuals.
    policy : Policy
        Chooses plans.
    transport : Transport
        Runs rounds.
    telemetry : Telemetry
        Shares the seconds of steps between ranks.
    pace : Pace
        Finds out which rank is slowest.
    count : int
        Steps so far.
    last_step : StepRecord or None
        Record of the last step.
    staging : Staging
        Brings arrays of devices to the host and back.
    loaded : Loaded or None
        A loaded state that waits for the next step, or None.
    plans : dict of int to Plan
        By bucket, the plan that the last step has run.
    outside : Tally
        Bytes of rounds since the last step that belong to no step; the record of the next one takes them over.
    suspect : bool
        Whether the last step has failed here in a way that the other ranks may not know of: all of them then compare
        whether it has, at the next one.
    survives : bool
        Whether those that are left go on where a rank dies: then all of them agree in each step that it is applied.
    failed : RankFailedError or None
        That a rank was found to have died, outside of `Reducer.reduce` or when the last step was applied already.
    lost : list of int
        Ranks that have died since the last step, by their numbers in the whole job.
    stop : bool
        Whether all ranks know that some rank was asked to stop.
    number : int
        Tells reducers of this process apart.
    describer : SpecCache
        Describes the gradients of a step.
    """

    settings: dict[str, Any]
    nonfinite: str
    seed: int
    entry: Entry
    layout: Layout
    policy: Policy
    transport: Transport
    telemetry: Telemetry
    pace: Pace
    count: int = 0
    last_step: StepRecord | None = None
    staging: Staging = field(default_factory=Staging)
    plans: dict[int, Plan] = field(default_factory=dict)
    outside: Tally = field(default_factory=Tally)
    loaded: Loaded | None = None
    suspect: bool = False
    survives: bool = False
    failed: RankFailedError | None = None
    lost: list[int] = field(default_factory=list)
    stop: bool = False
    number: int = field(default_factory=lambda: next(_numbers))
    describer: SpecCache = field(default_factory=SpecCache)

    def expect(self, gradients: Mapping[str, Any]) -> None:
        """Begin to take gradients to where they are exchanged, in the thread that made them; nothing waits."""
        there: dict[Device, list[Any]] = {}
        for name, gradient in gradients.items():
            device = self.layout.device_of(name)
            if device is not HOST:
                there.setdefault(device, []).append(gradient)
            elif self.layout.has(name):
                self.staging.start(name, gradient)
        for device, own in there.items():
            device.wait_stream(own)

    def input_of(self, name: str, gradient: Any) -> Any:
        """Return a gradient where its bucket lives, or where it can be brought from at once."""
        return self.staging.host(name, gradient) if self.layout.device_of(name) is HOST else gradient

    def loading(self) -> dict[str, Any]:
        """Return the parts of a loaded state, beside its step, that all ranks must share: plans follow from them."""
        learnt = self.policy.state_dict() if self.loaded is None else self.loaded.policy
        digest = hashlib.blake2b(json.dumps(learnt, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()
        return {"what the policy has learnt": digest, "whether a state was loaded": self.loaded is not None}

    def take_up(self) -> None:
        """Take up the loaded state.

        Raises
        ------
        ConfigurationError
            Where it is no state of this policy, which is then as it was.
        """
        if self.loaded is None:
            return
        cost, before = self.loaded.cost, self.policy.state_dict()
        if cost is not None and cost.network.hosts != self.transport.group.hosts:
            cost = None
        try:
            self.policy.load_state_dict(self.loaded.policy, cost)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            self.policy.load_state_dict(before, None)
            raise ConfigurationError(
                f"reducer: the loaded state is none of policy '{self.policy.id}' ({type(error).__name__}: {error}); "
                "delete state['policy'] to begin without"
            ) from error
