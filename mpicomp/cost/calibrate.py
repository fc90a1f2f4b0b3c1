"""One cost model for all ranks: given, remembered, or measured."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicomp.collectives import Scheme
from mpicomp.cost.kernels import Alone, measure_alone
from mpicomp.cost.model import CostModel, scheme_key
from mpicomp.cost.network import Network
from mpicomp.cost.probe import QUICK, THOROUGH, Effort, probe
from mpicomp.errors import ConfigurationError
from mpicomp.places import HOST, Place
from mpicomp.rounds import Round, Rounds, gather_rows
from mpicomp.rounds.reports import from_one
from mpicomp.transport.base import Transport
from mpicomp.transport.clocks import compare_clocks

_remembered: dict[tuple[str, tuple[int, ...], int], CostModel] = {}

_BYTE = np.dtype(np.uint8)


def calibrate(transport: Transport) -> CostModel:
    """Measure links and operations and return a new cost model. Collective; about a second."""
    model = CostModel(Network(transport.group.hosts))
    transport.run(_measure(model, transport))
    return model


def calibrate_for_elsewhere(known: CostModel | None, transport: Transport) -> CostModel:
    """Return what is known of schemes, with links and operations measured anew, for predictions of other ranks.

    What a training has learnt of its network predicts the plans that it runs: where a link was estimated wrongly,
    their factors make up for it, and those of all others do not. Here each is measured by itself, with messages as
    long as gradients are. Corrections of plans' rounds, which were made to the network before, are left out.
    Collective; up to half a minute on a slow link.

    Parameters
    ----------
    known : CostModel or None
        Is left as it is.
    transport : Transport
        Among the ranks.
    """
    model = CostModel(Network(transport.group.hosts)) if known is None else CostModel.from_json(known.to_json())
    model.network = Network(transport.group.hosts)
    model.rounds_learnt.clear()
    transport.run(_measure(model, transport, THOROUGH))
    return model


def share_model(given: CostModel | str | None, transport: Transport) -> Rounds[CostModel]:
    """Return a cost model with the state of rank 0 on all ranks. Collective over all ranks, as rounds.

    It is a copy of the one that was given, or read from a file; or what an earlier reducer of this process measured
    among ranks of the same layout; or it is measured now, unless ``MPICOMP_PROBE=0`` says that the first steps
    shall do.

    Raises
    ------
    ConfigurationError
        On all ranks, where rank 0 was given something else or cannot read the file, or where the model is of another
        number of hosts.
    """
    group = transport.group
    content: dict[str, Any] = {}
    if group.rank == 0:
        try:
            content = _first_rank_knows(given, transport)
        except ConfigurationError as error:
            content = {"error": str(error)}
    content = yield from from_one(content, transport.group, "cost")
    if "error" in content:
        raise ConfigurationError(content["error"])
    if "model" in content:
        yield from compare_clocks(transport)
        model = CostModel.from_json(content["model"])
    else:
        model = CostModel(Network(group.hosts))
        if content.get("probe"):
            yield from _measure(model, transport)
    if transport.family is not None:
        _remembered[_layout(transport)] = model
    return model


def first_says(flag: bool, transport: Transport) -> Rounds[bool]:
    """Return rank 0's flag on all ranks. Collective over all ranks, as a round of a byte."""
    [said] = yield from flags_of_first([flag], transport)
    return said


def flags_of_first(flags: Sequence[bool], transport: Transport) -> Rounds[list[bool]]:
    """Return rank 0's flags, as many as all ranks have, on all ranks. Collective over all ranks, as a round."""
    send = np.array(flags, _BYTE) if transport.group.rank == 0 else None
    said = yield Round("bcast", (len(flags),), _BYTE, send=send, recv=np.empty(len(flags), _BYTE))
    return [bool(own) for own in said]


def measure_kernels(
    model: CostModel,
    schemes: Sequence[Scheme[Any]],
    feedback: bool,
    transport: Transport,
    ladder: bool = False,
    place: Place = HOST,
    on_device: bool = False,
) -> Rounds[None]:
    """Measure the own work of schemes that the model does not know; the slowest rank's counts.

    Collective, as rounds.

    Parameters
    ----------
    model : CostModel
        The model that learns.
    schemes : sequence of Scheme
        The schemes to measure.
    feedback : bool
        Whether there is a residual to be added.
    transport : Transport
        Among the ranks.
    ladder : bool
        Whether what is measured at two ratios of a compressor shall do for all of them.
    place : Place
        Where this rank measures.
    on_device : bool
        Whether the seconds are kept as those of a device, the same on all ranks: some may measure on the host.
    """
    unknown: dict[str, list[Scheme[Any]]] = {}
    for scheme in schemes:
        key = scheme_key(scheme, ladder, on_device)
        if key not in model.kernels:
            unknown.setdefault(key, []).append(scheme)
    if not unknown:
        return
    alone = []
    for alike in unknown.values():
        ends = sorted(alike, key=lambda scheme: float(getattr(scheme.compressor, "ratio", 1.0)))
        apart = getattr(ends[0].compressor, "ratio", 1.0) < getattr(ends[-1].compressor, "ratio", 1.0)
        alone.append(measure_alone(ends[0], ends[-1] if apart else None, feedback, transport.clock, place))
    slowest = (yield from gather_rows(np.array(alone), transport.group)).max(axis=0)
    for key, numbers in zip(unknown, slowest, strict=True):
        model.kernels[key] = Alone(*map(float, numbers))


def _first_rank_knows(given: CostModel | str | None, transport: Transport) -> dict[str, Any]:
    model = CostModel.load(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(model, CostModel | None):
        raise ConfigurationError(f"cost: must be a CostModel or the name of a file, got {given!r}")
    hosts = transport.group.hosts
    if model is not None and model.network.hosts != hosts:
        raise ConfigurationError(
            f"cost: the model is of {model.network.hosts} hosts and the ranks are on {hosts}; measure another one "
            "with `mpicomp bench collectives --calibrate FILE`"
        )
    if model is None and transport.family is not None:
        model = _remembered.get(_layout(transport))
    if model is not None:
        return {"model": model.to_json()}
    wanted = os.environ.get("MPICOMP_PROBE", "1")
    if wanted not in ("0", "1"):
        raise ConfigurationError(f"cost: MPICOMP_PROBE must be 0 or 1, got {wanted!r}")
    return {"probe": wanted == "1" and transport.probes}


def _measure(model: CostModel, transport: Transport, effort: Effort = QUICK) -> Rounds[None]:
    yield from compare_clocks(transport)
    yield from probe(model.network, transport, effort)


def _layout(transport: Transport) -> tuple[str, tuple[int, ...], int]:
    assert transport.family is not None
    return transport.family, transport.group.layout, transport.group.size
