"""What pages take from the code: every compressor and collective, with what fits, what it sends and its parameters."""

import re

import numpy as np
import pytest
from tables import DOCS, FILL

import mpicomp
from mpicomp.collectives import collective_class, fitting
from mpicomp.compressors import compressor_class
from mpicomp.mpi import LocalWorld

COMPRESSORS = FILL((DOCS / "compressors.md").read_text())
COLLECTIVES = FILL((DOCS / "collectives.md").read_text())


def ours(names, cls_of):
    return [name for name in names if cls_of(name).__module__.startswith("mpicomp.")]


def section(page, name):
    parts = re.split(r"^### (.+)$", page, flags=re.MULTILINE)
    return parts[parts.index(name) + 1]


def test_every_compressor_has_a_row_and_a_section_with_what_fits():
    for name in ours(mpicomp.list_compressors(), compressor_class):
        cls = compressor_class(name)
        [row] = re.findall(rf"^\| \[`{name}`\]\(#{name}\) \| (.+) \|$", COMPRESSORS, flags=re.MULTILINE)
        family, _, feedback, size = row.split(" | ")
        assert family == cls.family
        assert (feedback == "on") == cls().feedback
        assert float(size) == pytest.approx(cls().wire_bytes_per_element(4), rel=0.01)
        text = section(COMPRESSORS, name)
        assert f"Paper: {cls.paper}." in text
        assert re.findall(r"\(collectives\.md#([\w-]+)\)", text) == fitting(cls)
        assert f".{cls.__name__}\n" in text


def test_every_collective_has_a_row_and_a_section():
    for name in ours(mpicomp.list_collectives(), collective_class):
        assert f"| [`{name}`](#{name}) | {collective_class(name).messages} |" in COLLECTIVES
        assert f"Paper: {collective_class(name).paper}." in section(COLLECTIVES, name)
        for fits in re.findall(r"\(compressors\.md#([\w-]+)\)", section(COLLECTIVES, name)):
            assert name in fitting(compressor_class(fits))


def test_megabytes_of_the_table_are_those_that_an_exchange_sends():
    for name, compressor in (("ring", "dense"), ("allgather", "topk")):
        [row] = re.findall(rf"^\| \[`{name}`\]\(#{name}\) \| .+ \|$", COLLECTIVES, flags=re.MULTILINE)
        documented_mb = float(row.strip("| ").split(" | ")[3])
        world = LocalWorld(4)
        reducers = [mpicomp.Reducer(compressor, name, comm=transport) for transport in world.transports]
        arrays = [np.random.default_rng(rank).laplace(size=1 << 20).astype(np.float32) for rank in range(4)]
        world.run([reducer.rounds({"w": array}) for reducer, array in zip(reducers, arrays, strict=True)])
        sent = np.mean([sum(bucket.wire_bytes for bucket in reducer.last_step.buckets) for reducer in reducers])
        assert sent / 1e6 == pytest.approx(documented_mb, rel=0.02)
