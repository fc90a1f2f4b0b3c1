"""One cost model for all ranks: passed by the user, cached, or measured."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicomp.collectives import Scheme
from mpicomp.cost.kernel_costs import KernelCost, measure_kernel, run_kernels
from mpicomp.cost.link_probe import probe
from mpicomp.cost.model import CostModel, scheme_key
from mpicomp.cost.network_model import Network
from mpicomp.errors import ConfigurationError
from mpicomp.gpu import HOST, Device
from mpicomp.job import variables
from mpicomp.mpi.clocks import compare_clocks
from mpicomp.mpi.rounds import Group, Round, Rounds, from_one, gather_rows
from mpicomp.mpi.transport import Transport

_cached: dict[tuple[str, tuple[int, ...], int], CostModel] = {}

_BYTE = np.dtype(np.uint8)


def calibrate(transport: Transport) -> CostModel:
    """Measure links and operations and return a new cost model. Collective; about a second."""
    model = CostModel(Network(transport.group.hosts))
    transport.run(compare_clocks(transport))
    transport.run(probe(model.network, transport))
    return model


def share_model(source: CostModel | str | None, transport: Transport) -> Rounds[CostModel]:
    """Return a cost model with the state of rank 0 on all ranks. Collective over all ranks, as rounds.

    It is a copy of rank 0's ``source``, a model or the name of a file; else of the one that an earlier reducer of this
    process shared among ranks of the same layout; else measured, or with ``MPICOMP_PROBE=0`` left to the first steps.
    """
    group = transport.group
    content: dict[str, Any] = {}
    if group.rank == 0:
        try:
            content = _model_of_rank_0(source, transport)
        except ConfigurationError as error:
            content = {"error": str(error)}
    content = yield from from_one(content, transport.group, "cost")
    if "error" in content:
        raise ConfigurationError(content["error"])
    if "model" in content or content["probe"]:
        yield from compare_clocks(transport)
    model = CostModel.from_json(content["model"]) if "model" in content else CostModel(Network(group.hosts))
    if content.get("probe"):
        yield from probe(model.network, transport)
    if transport.family is not None:
        _cached[_layout(transport)] = model
    return model


def broadcast_flags(flags: Sequence[bool], transport: Transport) -> Rounds[list[bool]]:
    """Return rank 0's flags on all ranks, as many as each has. Collective over all ranks, as a round."""
    send = np.array(flags, _BYTE) if transport.group.rank == 0 else None
    received = yield Round("bcast", (len(flags),), _BYTE, send=send, recv=np.empty(len(flags), _BYTE))
    return [bool(flag) for flag in received]


def measure_kernels(
    model: CostModel,
    schemes: Sequence[Scheme[Any]],
    feedback: bool,
    transport: Transport,
    ladder: bool = False,
    device: Device = HOST,
    on_device: bool = False,
) -> Rounds[None]:
    """Measure the kernels of schemes that the model does not know; the slowest rank counts. Collective, as rounds.

    With ``ladder`` two ratios of a compressor count for all of them. ``on_device`` is the same on all ranks.
    """
    unknown: dict[str, list[Scheme[Any]]] = {}
    for scheme in schemes:
        key = scheme_key(scheme, ladder, on_device)
        if key not in model.kernels:
            unknown.setdefault(key, []).append(scheme)
    if not transport.times_kernels:
        model.kernels |= dict.fromkeys(unknown, KernelCost(0.0, 0.0))
    if not unknown or not transport.times_kernels:
        return
    if transport.family is not None:
        for scheme in compilation_order([same[0] for same in unknown.values()], transport.group):
            run_kernels(scheme, feedback, device)
    measured = []
    for same in unknown.values():
        ends = sorted(same, key=lambda scheme: float(getattr(scheme.compressor, "ratio", 1.0)))
        differ = getattr(ends[0].compressor, "ratio", 1.0) < getattr(ends[-1].compressor, "ratio", 1.0)
        measured.append(measure_kernel(ends[0], ends[-1] if differ else None, feedback, transport.clock, device))
    slowest = (yield from gather_rows(np.array(measured), transport.group)).max(axis=0)
    for key, numbers in zip(unknown, slowest, strict=True):
        model.kernels[key] = KernelCost(*map(float, numbers))


def compilation_order(schemes: Sequence[Scheme[Any]], group: Group) -> list[Scheme[Any]]:
    """Return the order in which this rank runs schemes for the first time, so that a host's ranks share compilation.

    Each pair of ranks has a part of the list, of which one starts at the beginning and one at the end. The others'
    results are loaded, so all ranks end at about the same time, and none compiles while another one measures.
    """
    host = group.layout[group.rank]
    ranks = [rank for rank, other in enumerate(group.layout) if other == host]
    place = ranks.index(group.rank)
    if place % 2:
        end = len(schemes) * (place + 1) // len(ranks)
        return [*reversed(schemes[:end]), *reversed(schemes[end:])]
    start = len(schemes) * place // len(ranks)
    return [*schemes[start:], *schemes[:start]]


def _model_of_rank_0(source: CostModel | str | None, transport: Transport) -> dict[str, Any]:
    model = CostModel.load(source) if isinstance(source, str | os.PathLike) else source
    if not isinstance(model, CostModel | None):
        raise ConfigurationError(f"cost: must be a CostModel or the name of a file, got {source!r}")
    hosts = transport.group.hosts
    if model is not None and model.network.hosts != hosts:
        raise ConfigurationError(
            f"cost: the model is of {model.network.hosts} hosts and the ranks are on {hosts}; measure another one "
            "with `mpicomp bench collectives --calibrate FILE`"
        )
    if model is None and transport.family is not None:
        model = _cached.get(_layout(transport))
    if model is not None:
        return {"model": model.to_json()}
    return {"probe": variables.flag("MPICOMP_PROBE") is not False and transport.probes}


def _layout(transport: Transport) -> tuple[str, tuple[int, ...], int]:
    assert transport.family is not None
    return transport.family, transport.group.layout, transport.group.size
