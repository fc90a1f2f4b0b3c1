"""Checks of a reducer's keywords, and its policy as they configure it."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from mpicomp.compressors import get_compressor
from mpicomp.errors import ConfigurationError, UnknownNameError
from mpicomp.policies import Policy, UserSettings, get_policy
from mpicomp.policies.warmup import WarmUp, choose_warmup

if TYPE_CHECKING:
    from mpicomp.reducer.reducer import Reducer

Settings = ParamSpec("Settings")


def with_known_settings(
    make: Callable[Concatenate["Reducer", Settings], None],
) -> Callable[Concatenate["Reducer", Settings], None]:
    """Let a reducer refuse unknown keywords in the project's words, not in Python's."""

    @functools.wraps(make)
    def checked(self: "Reducer", /, *args: Settings.args, **settings: Settings.kwargs) -> None:
        check_settings(settings, args[0] if args else settings.get("compressor"), "reducer")
        make(self, *args, **settings)

    return checked


def check_settings(settings: Mapping[str, Any], compressor: Any, subsystem: str) -> None:
    """Refuse keywords that are no settings of a reducer; say where those of a compressor belong."""
    from mpicomp.reducer.reducer import Reducer

    known = inspect.signature(Reducer).parameters
    unknown = {name: value for name, value in settings.items() if name not in known}
    if not unknown:
        return
    compressor = "topk" if compressor is None else compressor  # as an example
    config = get_compressor(compressor).get_config()
    inner = {name: value for name, value in unknown.items() if name in config and name != "id"}
    if not inner:
        raise UnknownNameError(f"{subsystem}: settings", next(iter(unknown)), known)
    meant = get_compressor(config | inner)
    module = "mpicomp." if type(meant).__module__.startswith("mpicomp.") else ""
    raise ConfigurationError(
        f"{subsystem}: {', '.join(inner)} must be set in the compressor; pass compressor={module}{meant!r}, or its "
        f"configuration, { ({'id': config['id']} | inner)!r}"
    )


def make_planner(
    named: Policy | str | Mapping[str, Any] | None, settings: UserSettings
) -> tuple[Policy, Policy, int | str]:
    """Return the configured policy, the policy that plans first (the warm-up, if any), and the warm-up's setting."""
    default = "auto" if settings.compressor is None else "interval" if settings.local_steps else "static"
    policy = get_policy({"id": default} | dict(named) if isinstance(named, Mapping) else named or default)
    if policy.serves:
        raise ConfigurationError(
            f"reducer: this policy ({policy.id}) serves another reducer; make a second object, or pass its name or "
            "configuration"
        )
    if settings.local_steps and len(policy.local_choices) == 1:
        raise ConfigurationError(
            "reducer: the number of steps that ranks make between exchanges is chosen by policy='auto' or 'interval', "
            f"got policy='{policy.id}'; name one number of steps"
        )
    chosen = None if isinstance(named, Mapping) and "id" not in named else named
    warmup = choose_warmup(policy.warmup, settings.compressor, settings.collective, chosen, settings.feedback)
    planner = WarmUp(policy, warmup) if warmup else policy
    planner.configure(replace(settings, cost=policy.known_cost))
    return policy, planner, warmup


def to_decay(value: Any) -> float:
    """Return the factor of residuals."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigurationError(f"reducer: feedback_decay must be above 0 and at most 1, got {value!r}")
    return float(value)
