import json

import numpy as np
import pytest
from marks import slow
from networks import Link
from worlds import Ranks

import mpicomp
from mpicomp.collectives import bind
from mpicomp.errors import ConfigurationError
from mpicomp.systems.lgc import LGC
from mpicomp.systems.lgc import compressor as module
from mpicomp.systems.lgc.compressor import Part
from mpicomp.testing import checks

pytest.importorskip("torch")

QUICK = [
    LGC(ratio=0.3, encoder=(2,), decoder=(2,), passes=1, dense_steps=0, training_steps=2),
    LGC(ratio=0.3, encoder=(2,), decoder=(2,), passes=1, dense_steps=1, training_steps=2, instance="server"),
    LGC(ratio=0.3, encoder=(2,), decoder=(2,), passes=1, dense_steps=0, training_steps=1, signs=False),
]
MODEL = {
    "in.weight": (8, 1, 3, 3),
    "in.bias": (8,),
    "mid.weight": (100, 90),
    "mid.bias": (100,),
    "out.weight": (10, 100),
}


@pytest.mark.parametrize("compressor", QUICK, ids=repr)
@pytest.mark.parametrize("place", range(len(checks(QUICK[0]))))
def test_laws(compressor, place):
    checks(compressor)[place]()


def parts(compressor, sizes):
    names = list(sizes)
    placed = compressor.bind(names, list(sizes.values()))
    return placed.selected(sum(sizes.values())).parts


def test_first_and_last_layer_are_exceptions():
    sizes = {"out.bias": 10, "out.weight": 90, "b.weight": 5000, "a.weight": 5000, "a.bias": 50, "in": 60}
    expected = (
        Part(0, 100, 10, "sparse"),
        Part(100, 5100, 500, "coded"),
        Part(5100, 10150, 505, "coded"),
        Part(10150, 10210, 60, "dense"),
    )
    assert parts(LGC(ratio=0.1), sizes) == expected
    forward = dict(reversed(sizes.items()))
    assert [part.travels for part in parts(LGC(ratio=0.1, backward=False), forward)] == [
        "dense",
        "coded",
        "coded",
        "sparse",
    ]


IN_BETWEEN = {"out.weight": 100, "a": 3000, "in.bias": 4, "b": 3000, "out.bias": 10, "c": 3000, "in.weight": 40}


@pytest.mark.parametrize(
    ("sizes", "travels"),
    [
        # A first layer is coded from a hundredth of the parameters on, and all layers where there are few.
        ({"out": 10, "mid": 9891, "in": 99}, ["sparse", "coded", "dense"]),
        ({"out": 10, "mid": 9890, "in": 100}, ["sparse", "coded", "coded"]),
        ({"w": 1000}, ["coded"]),
        ({"a.weight": 1000, "a.bias": 5, "b.weight": 9}, ["coded"] * 2),
        (IN_BETWEEN, ["sparse", *["coded"] * 5, "dense"]),  # what is coded is in one piece
    ],
)
def test_layers_travel_by_their_place_and_size(sizes, travels):
    assert [part.travels for part in parts(LGC(ratio=0.1), sizes)] == travels


def test_buckets_of_a_model_know_its_layers():
    names, sizes = ["out", "c", "b", "a", "in"], [500, 9000, 9000, 9000, 20]
    model = dict(zip(names, sizes, strict=True))
    bound = [
        LGC(ratio=0.1).bind(names[start:stop], sizes[start:stop], model=model)
        for start, stop in ((0, 2), (2, 3), (3, 5))
    ]
    travels = [
        [part.travels for part in each.selected(sum(p.stop - p.start for p in each.parts)).parts] for each in bound
    ]
    assert travels == [["sparse", "coded"], ["coded"], ["coded", "dense"]]
    assert bound[1] == bound[0].bind(["b"], [9000])  # the model is known already
    assert bound[0].get_config() == LGC(ratio=0.1).get_config()


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        *[("ratio", [0]), ("instance", ["star"]), ("error", [None]), ("innovation", [0]), ("dense_steps", [-1])],
        *[("training_steps", [0, 1.5]), ("passes", [True]), ("signs", [2]), ("backward", [2]), ("learning_rate", [-1])],
        *[("encoder", [[], [8, 0], [8, 8]]), ("decoder", [8]), ("published", [1])],
    ],
)
def test_parameters_that_cannot_be(setting, values):
    for value in values:
        with pytest.raises(ConfigurationError, match=f"lgc: .*{setting}.* must .* got"):
            mpicomp.get_compressor({"id": "lgc", setting: value})


def test_without_torch_it_is_refused(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="lgc: its code is trained with torch: pip install"):
        bind(LGC(), "learned")


def gradients(rng, ranks, noise=0.3):
    common = {name: rng.standard_t(4, shape) for name, shape in MODEL.items()}
    return [
        {name: (entry + noise * rng.standard_t(4, entry.shape)).astype(np.float32) for name, entry in common.items()}
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("instance", ["ring", slow("server")])
def test_what_is_decoded_comes_nearer_while_it_learns(instance):
    members = Ranks(2, LGC(ratio=0.1, instance=instance, dense_steps=2, training_steps=60), "learned")
    rng = np.random.default_rng(1)
    errors = []
    for _ in range(70):
        members.reduce([{n: gradient[n] for n in reversed(gradient)} for gradient in gradients(rng, 2)])
        errors.append(members.reducers[0].layout.buckets[0].memory["lgc"]["error"])
    assert errors[:2] == [None, None]
    learning, coded = errors[2:62], errors[62:]
    assert np.mean(learning[-10:]) < 0.5 * np.mean(learning[:3])
    assert np.mean(learning[-10:]) < 0.4  # zeros have 1
    assert max(coded) < 0.8


def test_lgc_without_first_phases_has_a_code_at_step_two():
    compressor = LGC(ratio=0.3, encoder=(2,), decoder=(2,), passes=1, instance="server").bind([], [], warm_up=False)
    members = Ranks(2, compressor, "learned")
    for _ in range(2):
        members.reduce([{"w": np.ones(1000, np.float32)} for _ in range(2)])
    assert "lgc: coded, server" in members.reducers[0].last_step.buckets[0].reason
    placed = LGC().bind(["out", "mid", "in"], [100, 10_000, 10])
    settled = LGC().bind(["out", "mid", "in"], [100, 10_000, 10], warm_up=False)
    assert settled.selected(10_110) == placed.selected(10_110)


def test_lgc_learning_steps_are_never_replaced():
    """Where any collective may be chosen, dense exchange is none of them: steps would be missing."""
    members = Ranks(
        2,
        LGC(ratio=0.3, encoder=(2,), decoder=(2,), passes=1, dense_steps=2, training_steps=20),
        network=Link(1e-5, 1e9),
    )
    ran = set()
    for _ in range(30):
        members.reduce([{"w": np.ones(1000, np.float32)} for _ in range(2)])
        record = members.reducers[0].last_step.buckets[0]
        ran.add((record.compressor["id"], record.collective.partition(":")[0]))
    assert ran == {("lgc", "learned")}
    assert "lgc: coded" in record.reason


def test_published_is_the_papers_values_and_its_first_layer():
    compressor = mpicomp.get_compressor({"id": "lgc", "as_published": True})
    config = json.loads(json.dumps(compressor.get_config()))
    assert mpicomp.get_compressor(config) == compressor == LGC.as_published()
    assert (compressor.ratio, compressor.dense_steps, compressor.training_steps) == (0.001, 200, 300)
    assert LGC.as_published(dense_steps=3) == mpicomp.get_compressor(config | {"dense_steps": 3})
    # The first layer is dense whatever its size, the last one's largest values travel as they are.
    assert [part.travels for part in parts(compressor, {"out": 10, "mid": 500, "in": 490})] == [
        "sparse",
        "coded",
        "dense",
    ]
