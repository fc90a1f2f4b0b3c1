"""Checks of the arguments of public functions, and a reducer's policy as they configure it."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NoReturn, ParamSpec, TypeVar

from mpicomp.compressors import get_compressor
from mpicomp.errors import ConfigurationError, MpicompError, UnknownNameError
from mpicomp.mpi.connect import connected
from mpicomp.policies import Policy, UserSettings, get_policy
from mpicomp.policies.schedule import WarmUp, choose_warmup
from mpicomp.reducer.agreement import run_collectively
from mpicomp.setting_checks import check_kind, check_range, kinds_of

Settings = ParamSpec("Settings")
Made = TypeVar("Made")

_COMM = "pass comm=, a communicator of mpi4py, or leave it out for all ranks"
_AVERAGED = "gradients are averaged, as in DistributedDataParallel; leave it out"
_ACCUMULATE = "put every backward but the last one into `with optimizer.accumulate():`"
_EVERY = "the steps from one exchange to the next are sync_every= of UpdateOptimizer and LocalMuon"
_ADVICE = {
    "process_group": _COMM,
    "process_set": _COMM,
    "group": _COMM,
    "every": _EVERY,
    "local_steps": _EVERY,
    "compression": "pass compressor=, such as {'id': 'dense', 'wire': 'fp16'}, or leave it out to let mpicomp choose",
    "backward_passes_per_step": _ACCUMULATE,
    "gradient_accumulation_steps": _ACCUMULATE,
    "op": _AVERAGED,
    "average": _AVERAGED,
    "gradient_predivide_factor": _AVERAGED,
    "device": "arrays stay on their device; choose that by mpicomp.local_device(), and leave this out",
    "device_ids": "arrays stay on their device; choose that by mpicomp.local_device(), and leave this out",
    "root_rank": "the rank whose values are sent is root=",
    "src": "the rank whose values are sent is root=",
    "bucket_cap_mb": "pass bucket_bytes=",
    "find_unused_parameters": "a parameter without a gradient on some rank counts as zeros there; leave it out",
    "static_graph": "a parameter without a gradient on some rank counts as zeros there; leave it out",
    "broadcast_buffers": "call mpicomp.torch.broadcast_parameters(model) once, which sends buffers, too; leave it out",
}
"""Advice for arguments of Horovod, DistributedDataParallel and others."""


def check_arguments(
    subsystem: str, *others: Callable[..., Any], world: Callable[[], Any] = lambda: None
) -> Callable[[Callable[Settings, Made]], Callable[Settings, Made]]:
    """Let a function that is collective over ``comm`` refuse wrong names and kinds of arguments, on all ranks.

    NumPy's numbers are passed on as Python's. Its ``**settings`` are arguments of the ``others``. ``world`` returns
    the transport of ``comm=None``. A rank with a wrong argument connects and reports, as the function itself does
    first on the other ranks.
    """

    def decorate(make: Callable[Settings, Made]) -> Callable[Settings, Made]:
        parameters = inspect.signature(make).parameters
        named = {name: entry for name, entry in parameters.items() if entry.kind is not entry.VAR_KEYWORD}
        places = [name for name, entry in named.items() if entry.kind is not entry.KEYWORD_ONLY]
        needed = {name for name, entry in named.items() if entry.default is entry.empty}
        kinds = {name: kinds_of(entry) for name, entry in named.items()}

        def checked(name: str, value: Any) -> Any:
            accepted = kinds.get(name)
            if accepted is None or type(value) in accepted:
                return value
            return check_kind(subsystem, name, value, accepted, named[name].default)

        def check_names(given: Mapping[str, Any], values: tuple[Any, ...], settings: Mapping[str, Any]) -> None:
            if len(values) > len(places):
                last = f"{places[-1]} is the last argument without a name" if places else "all arguments have names"
                raise ConfigurationError(f"{subsystem}: {last}, got {len(values)} of them; name the others")
            twice = [name for name in settings if name in places[: len(values)]]
            if twice:
                raise ConfigurationError(f"{subsystem}: {twice[0]} was passed twice, by its place and by its name")
            theirs = [entry for other in others for entry in inspect.signature(other).parameters.values()]
            known = dict.fromkeys([*named, *(entry.name for entry in theirs if entry.default is not entry.empty)])
            passed = {name: value for name, value in given.items() if name != "self"}
            check_settings(passed, given.get("compressor"), subsystem, [name for name in known if name != "self"])
            missing = [name for name in named if name in needed and name not in given]
            if missing:
                example = ", such as model.named_parameters()" if missing[0] == "named_parameters" else ""
                raise ConfigurationError(f"{subsystem}: {missing[0]} is missing; pass it{example}")

        @functools.wraps(make)
        def call(*values: Settings.args, **settings: Settings.kwargs) -> Made:
            given = dict(zip(places, values, strict=False)) | settings
            try:
                if len(given) < len(values) + len(settings) or not needed <= given.keys() <= named.keys():
                    check_names(given, values, settings)
                arguments = [checked(name, value) for name, value in zip(places, values, strict=False)]
                options = {name: checked(name, value) for name, value in settings.items()}
            except ConfigurationError as error:
                _refuse_together(error, given.get("comm"), world, subsystem)
            return make(*arguments, **options)

        return call

    return decorate


def _refuse_together(error: MpicompError, comm: Any, world: Callable[[], Any], subsystem: str) -> NoReturn:
    def refuse() -> None:
        raise error

    with connected(world() if comm is None else comm) as transport:
        run_collectively(refuse, transport, subsystem)
    raise error


def check_settings(settings: Mapping[str, Any], compressor: Any, subsystem: str, known: Collection[str]) -> None:
    """Refuse unknown keywords, with advice for those of a compressor and of other libraries."""
    unknown = {name: value for name, value in settings.items() if name not in known}
    if not unknown:
        return
    name = next(iter(unknown))
    if name in _ADVICE:
        raise UnknownNameError(f"{subsystem}: settings", name, known, _ADVICE[name])
    compressor = "topk" if compressor is None else compressor  # as an example
    config = get_compressor(compressor).get_config()
    inner = {name: value for name, value in unknown.items() if name in config and name != "id"}
    if not inner:
        raise UnknownNameError(f"{subsystem}: settings", name, known)
    meant = get_compressor(config | inner)
    module = "mpicomp." if type(meant).__module__.startswith("mpicomp.") else ""
    raise ConfigurationError(
        f"{subsystem}: {', '.join(inner)} must be set in the compressor; pass compressor={module}{meant!r}, or its "
        f"configuration, { ({'id': config['id']} | inner)!r}"
    )


def make_planner(
    named: Policy | str | Mapping[str, Any] | None, settings: UserSettings, default: str | None = None
) -> tuple[Policy, Policy, int | str]:
    """Return the configured policy, the policy that plans first (the warm-up, if any), and the warm-up's setting."""
    default = default or ("auto" if settings.compressor is None else "static")
    policy = get_policy({"id": default} | dict(named) if isinstance(named, Mapping) else named or default)
    if policy.serves:
        raise ConfigurationError(
            f"reducer: this policy ({policy.id}) serves another reducer; make a second object, or pass its name or "
            "configuration"
        )
    chosen = None if isinstance(named, Mapping) and "id" not in named else named
    warmup = choose_warmup(policy.warmup, settings.compressor, settings.collective, chosen, settings.feedback)
    planner = WarmUp(policy, warmup) if warmup else policy
    planner.configure(replace(settings, cost=policy.known_cost))
    return policy, planner, warmup


def to_decay(value: Any) -> float:
    """Return the factor of residuals."""
    return check_range("reducer", "feedback_decay", value, 0, 1, above=True)
