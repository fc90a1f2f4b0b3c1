"""All that reads what others have sent or written, found from the registries: nobody keeps a list."""

import contextlib
import json
import tempfile
from pathlib import Path

import numpy as np
from faults.genuine_messages import (
    LEARNED,
    Case,
    Decoder,
    code_of_indices,
    dense,
    learned_code,
    packed,
    random_array,
    random_numel,
    several_codes,
    sparse,
)
from faults.whole_exchanges import agreement, fill, leader_message, whole_exchange

import mpicomp
from mpicomp.collectives import fitting, variants
from mpicomp.compressors import COMPRESSORS, Quantiser, compressor_class
from mpicomp.compressors.wire_format import INDICES, VALUES, Wire
from mpicomp.cost.kernel_costs import KernelCost
from mpicomp.cost.model import CostModel
from mpicomp.cost.network_model import Network
from mpicomp.errors import MpicompError
from mpicomp.policies import POLICIES
from mpicomp.policies.surveys import Spectra, SpectrumSurvey
from mpicomp.rounds.drive import drive
from mpicomp.testing.examples import example, representatives
from mpicomp.transport import LocalWorld


def decoders() -> dict[str, Decoder]:
    """Return every decoder of messages and files by name."""
    found: dict[str, Decoder] = {}
    for values in VALUES:
        for indices in INDICES:
            found[f"sparse/{values or 'full'}-{indices}"] = sparse(Wire(values, indices))
    for wire in (None, "fp16", "bf16"):
        found[f"dense/{wire or 'full'}"] = dense(wire)
    for compressor in _compressors():
        if isinstance(compressor, Quantiser):
            found[f"packed/{_name(compressor)}"] = packed(compressor)
    found["indices/elias-fano"] = code_of_indices
    found["indices/elias-fano-several"] = several_codes
    for instance in ("ring", "server"):
        found[f"lead/lgc-{instance}"] = leader_message(instance)
    found["code/autoencoder"] = learned_code
    found["survey/spectrum"] = _spectrum
    for policy in POLICIES.names():
        found[f"telemetry/{policy}"] = _telemetry(policy)
    found["header/agreement"] = agreement
    found["file/checkpoint"] = _checkpoint
    found["file/cost"] = _file(_written_cost, CostModel.load)
    return found


def exchanges() -> dict[str, Decoder]:
    """Return whole exchanges as one rank sees them, by name: every compressor with every collective that fits.

    What a collective is built on is varied for the first compressor of each kind of message and form of numbers.
    """
    found: dict[str, Decoder] = {}
    seen = set()
    learned = [mpicomp.LGC(**LEARNED, instance=instance) for instance in ("ring", "server")]
    plain = [example(compressor_class(name)) for name in COMPRESSORS.names()]
    for compressor in dict.fromkeys([*plain, *representatives(), *learned]):
        known = getattr(compressor, "count", lambda numel: 0)(1000) is not None
        kind = compressor.message, getattr(compressor, "wire", None), known, getattr(compressor, "instance", None)
        names = fitting(compressor) if kind in seen else [*fitting(compressor), *variants(compressor)]
        seen.add(kind)
        for name in dict.fromkeys(names):
            found[f"exchange/{_name(compressor)}/{name}"] = whole_exchange(compressor, name)
    return found


def _compressors():
    """Return what is registered, as `mpicomp.testing` tries it, and in every form that its parameters name."""
    found = []
    for name in COMPRESSORS.names():
        plain = example(compressor_class(name))
        for change in ({}, *_CHANGES):
            try:
                changed = mpicomp.get_compressor(plain.get_config() | change)
            except MpicompError:
                continue  # it has no such parameter
            if changed not in found:
                found.append(changed)
    return found


_CHANGES = [
    {"wire": None},
    {"wire": "fp16"},
    {"wire": "q4"},
    {"ratio": 0.4, "indices": "elias-fano"},
    {"bits": 2},
    {"bits": 8},
    {"bits": [3, 5, 12]},
    {"block": 64},
    {"bucket": 64},
    {"rounding": "nearest"},
    LEARNED,
    {**LEARNED, "instance": "server"},
]


def _name(compressor):
    config = compressor.get_config()
    defaults = example(type(compressor)).get_config()
    changed = [f"{key}={json.dumps(item)}" for key, item in config.items() if item != defaults[key]]
    return "-".join([compressor.id, *changed]).replace('"', "").replace(" ", "")


# What policies and agreements receive.


def _spectrum(rng, fence):
    sizes = [random_numel(rng) for _ in range(3)]
    ranks = int(rng.integers(1, 4))
    survey = SpectrumSurvey()
    sent = np.concatenate(
        [survey.measure(random_array(rng, sum(sizes), np.float32), None, sizes, 0) for _ in range(ranks)]
    )

    def decode(message):
        with np.errstate(all="ignore"):
            spectra = Spectra(sizes, message.view(np.float32).reshape(ranks, -1))
            assert spectra.energies.shape == (3,)
            assert spectra.lost(np.array([0.01, 0.5])).shape == (3, 2)
            assert spectra.lost_together(np.array([0.01, 0.5])).shape == (2,)

    return Case(sent.tobytes(), decode, resizes=False)


def _telemetry(name):
    """What ranks tell each other of the seconds of a step, and of surveys; then the policy chooses the next plans."""

    def make(rng, fence):
        world, first = LocalWorld(2), None
        for compressor in (None, "topk", {"id": "powersgd", "rank": 1}):  # what a policy can choose for
            with contextlib.suppress(MpicompError):
                reducers = [mpicomp.Reducer(compressor, policy=name, comm=end) for end in world.transports]
                first = reducers[0]
                for step in range(_STEPS):
                    gradients = [random_array(rng, 144, np.float32).reshape(12, 12) for _ in reducers]
                    world.run([reducer.rounds({"w": grad}) for reducer, grad in zip(reducers, gradients, strict=True)])
                    if step > 2 and first.telemetry.under_way:
                        break
                break
        under_way = list(first.telemetry.under_way)
        message = under_way[0][1].task.recv.tobytes() if under_way else b""

        def decode(message):
            if not under_way:  # it listens to nobody
                return
            step, pending, _ = under_way[0]
            fill(pending.task, message)
            first.telemetry.under_way.clear()
            first.telemetry.under_way.append(under_way[0])
            with np.errstate(all="ignore"):
                drive(first.telemetry.receive(first.planner, step), lambda asked: asked.task.recv)
                plan = first.planner.plan(0)
            assert plan.scheme.rounds(144, np.dtype(np.float32), world.transports[0].group)

        return Case(message, decode, resizes=False)

    return make


_STEPS = 24  # after which a policy that exchanges surveys now and then has done so


# Files.


def _checkpoint(rng, fence):
    state = {
        "epoch": int(rng.integers(99)),
        "model": {
            "w": random_array(rng, 17, np.float32),
            "b": random_array(rng, 3, np.float64),
            5: (None, True, [1.5, "text"]),
        },
        "step": np.int64(7),
    }
    alone = LocalWorld(1).transports[0]

    def write(rng, path):
        mpicomp.save_checkpoint(path.parent.parent, state, alone)

    def read(path):
        mpicomp.load_checkpoint(path.parent.parent, alone)

    return _file(write, read, "checkpoint-00000001/rank-00000.safetensors")(rng, fence)


def _written_cost(rng, path):
    model = CostModel(Network(2))
    for name in ("topk", "dense"):
        model.kernels[name] = KernelCost(*rng.random(3))
    model.save(path)


def _file(write, read, name="file"):
    def make(rng, fence):
        folder = tempfile.TemporaryDirectory(prefix="mpicomp-fuzz-", dir=_shared_memory())
        path = Path(folder.name) / name
        write(rng, path)
        message = path.read_bytes()

        def decode(message, folder=folder):
            path.write_bytes(message.tobytes())
            read(path)

        return Case(message, decode)

    return make


def _shared_memory():
    place = Path("/dev/shm")
    return place if place.is_dir() else None
