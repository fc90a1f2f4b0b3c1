"""Laws of all policies: changing plans lose nothing, undone steps do not count, impossible settings are refused."""

import numpy as np
import pytest
from marks import slow
from worlds import CheckedRanks

import mpicomp
from mpicomp.collectives import fitting
from mpicomp.errors import ConfigurationError, IncompatiblePairError
from mpicomp.mpi import LocalWorld
from mpicomp.testing import checks

WRONG = {  # values that a setting cannot have, each by itself
    "accordion": {"least": [0.2], "most": [0], "every": [0], "threshold": [0]},
    "flexible": {
        "least": [0.2], "most": [2], "factor": [1, 0.5], "gain_threshold": [0], "every": [0],
    },
    "gravac": {
        "least": [0.2], "most": [2], "window": [0], "omega": [-0.1, 1.1], "epsilon": [0, 1.1], "smoothing": [0.0],
        "scaling": ["linear"], "every": [0], "published": ["yes"],
    },
    "interval": {"penalty": [-0.1, float("inf"), True]},
    "lgreco": {
        "alpha": [0, -1], "every": [1], "first": [2.5, 1], "span": [0.5], "on": ["static", "lgreco", 3],
        "published": [1],
    },
    "schedule": {
        "begin": [0], "end": [1.5], "steps": [0], "shape": ["cosine"], "stages": [1],
    },
}  # fmt: skip
NO_GAIN, LAYERED = "needs the gain at other ratios, which {} cannot", mpicomp.TopK(layers={"a": 0.5})
COMPRESSORS = {
    "accordion": [
        *((name, f"chooses between two ratios, and {name} has none") for name in ("dense", "powersgd")),
        (LAYERED, "chooses ratios by itself, so topk cannot have ratios of its own .*policy='static'"),
    ],
    "auto": [(name, NO_GAIN.format(name)) for name in ("onebit", "powersgd")],
    "flexible": [
        *((name, NO_GAIN.format(name)) for name in ("dense", "powersgd", "onebit")),
        (LAYERED, "chooses ratios by itself, so topk cannot have ratios of its own .*policy='static'"),
    ],
    "gravac": [(name, NO_GAIN.format(name)) for name in ("dense", "onebit", "threshold")],
    "lgreco": [
        *(
            (name, f"needs a compressor with .*, which {name} has not; use topk")
            for name in ("dense", "sidco", "randomk")
        ),
        (LAYERED, "chooses settings of layers by itself, so topk cannot have them"),
        (mpicomp.PowerSGD(layers={"a": 2}), "chooses settings of layers by itself, so powersgd cannot have them"),
        (mpicomp.QSGD(layers={"a": 2}), "chooses settings of layers by itself, so qsgd cannot have them"),
        (mpicomp.PowerSGD(rows=64), "measures errors of whole matrices, and rows=64 cuts them"),
    ],
    "schedule": [
        (name, f"changes the ratio, which {name} does not have")
        for name in ("dense", "onebit", "powersgd", "threshold")
    ],
}


def refuse(error, text, compressor, policy, collective="auto"):
    with pytest.raises(error, match=text):
        mpicomp.Reducer(compressor, collective, policy, comm=LocalWorld(1).transports[0])


@pytest.mark.parametrize(
    ("policy", "setting", "value"),
    [(policy, name, value) for policy, wrong in WRONG.items() for name, values in wrong.items() for value in values],
)
def test_policy_impossible_setting_is_refused(policy, setting, value):
    refuse(ConfigurationError, f"^{policy}: {setting}.* must .* got .*{value}", "topk", {"id": policy, setting: value})


@pytest.mark.parametrize(
    ("policy", "compressor", "text"), [(policy, *row) for policy, rows in COMPRESSORS.items() for row in rows], ids=str
)
def test_policy_compressor_that_does_not_fit_is_refused(policy, compressor, text):
    refuse(ConfigurationError, f"^{policy}: {text}", compressor, policy)


@pytest.mark.parametrize(
    ("policy", "collective", "error", "text"),
    [
        ({"id": "flexible"}, "allreduce", IncompatiblePairError, "topk: does not fit collective 'allreduce'"),
        ({"id": "schedule", "begn": 0.5}, "auto", ConfigurationError, "unknown name 'begn'; did you mean 'begin'"),
    ],
)
def test_policy_pair_that_does_not_fit_is_refused(policy, collective, error, text):
    refuse(error, text, "topk", policy, collective)


@pytest.mark.parametrize(
    ("policy", "key", "expected"), [("accordion", "looked", 2), ("gravac", "steps", 2), ("schedule", "steps", 3)]
)
def test_policy_undone_step_does_not_count(policy, key, expected):
    """Steps of reports: the last one is still to come."""
    world = LocalWorld(2)
    reducers = [mpicomp.Reducer("topk", policy=policy, comm=end, nonfinite="skip") for end in world.transports]
    good, bad = ({"w": np.array([start, *range(1, 1000)], np.float32)} for start in (1, np.nan))
    for other in (good, bad, good, good):
        world.run([reducer.rounds(gradient) for reducer, gradient in zip(reducers, (good, other), strict=True)])
    assert reducers[0].policy.state_dict()[key] == expected


POLICIES = {
    "schedule": {"begin": 0.5, "end": 0.01, "steps": 6},
    "gravac": {"least": 0.005, "window": 3, "smoothing": 0.8},
    "accordion": {"least": 0.02, "most": 0.2, "every": 2},
}
CONCENTRATION = [4.0] * 8 + [0.2] * 4 + [3.0] * 8  # of the energy, by step
SIZES = {"a": 600, "b": 300}


def tailed(random, numel, power, norm):
    """Return a gradient of this norm whose energy is in the fewer elements the larger ``power`` is."""
    gradient = random.choice([-1, 1], numel) * random.exponential(size=numel) ** power
    return (norm / np.linalg.norm(gradient) * gradient).astype(np.float32)


@pytest.mark.parametrize(
    ("policy", "place"),
    [(name, place) for name in mpicomp.list_policies() for place in range(len(checks(mpicomp.get_policy(name))))],
)
def test_policy_keeps_the_laws_of_its_kind(policy, place):
    checks(mpicomp.get_policy({"id": policy} | POLICIES.get(policy, {})))[place]()


@pytest.mark.parametrize("collective", [name for name in fitting(mpicomp.TopK()) if "hierarchical" not in name])
@pytest.mark.parametrize("size", [1, slow(2), 3, slow(4)])
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_changing_plans_loses_nothing(policy, size, collective):
    settings = {"id": policy} | POLICIES[policy]
    ranks = CheckedRanks(size, mpicomp.TopK(), collective, policy=settings, bucket_bytes=4 * SIZES["a"])
    random, plans = np.random.default_rng(size), set()
    for step, power in enumerate(CONCENTRATION):
        # Heavy tails leave norms to chance: both layers may then change in the same periods, which are two plans
        norms = {"a": 1e3, "b": 1e3 * 10.0 ** (step // 4 % 2)}
        gradients = [{name: tailed(random, n, power, norms[name]) for name, n in SIZES.items()} for _ in range(size)]
        plans.add(str([bucket.compressor for bucket in ranks.step(gradients)]))
    assert len(plans) > 2
