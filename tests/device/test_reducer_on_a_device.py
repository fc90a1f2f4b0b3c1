"""What a reducer does besides exchanging, with arrays on a device: states, 16 bits, momentum, what is not finite."""

import numpy as np
import pytest
from device import fake_cuda
from worlds import Ranks

import mpicomp
from mpicomp.errors import DisagreementError, NonFiniteError
from mpicomp.transport.scheduler import ProgressThread

SHAPES = {"first": (30, 20), "second": (9,)}
SCHEDULES = ["lazy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "random"))]


@pytest.fixture(params=SCHEDULES)
def cupy(request, monkeypatch):
    return fake_cuda.install(monkeypatch, request.param)


def gradients_of(rank, step, dtype=np.float32):
    random = np.random.default_rng([rank, step])
    return {name: random.laplace(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def stepped(ranks, step, bring, **settings):
    given = [gradients_of(rank, step, **settings) for rank in range(len(ranks.reducers))]
    means = ranks.reduce([{name: bring(value) for name, value in item.items()} for item in given])
    return [{name: on_host(value) for name, value in mean.items()} for mean in means]


def on_host(value):
    return value.get() if isinstance(value, fake_cuda.ndarray) else value.copy()


def states(ranks):
    return [reducer.state_dict() for reducer in ranks.reducers]


@pytest.mark.parametrize("loads", ["host", "device"])
@pytest.mark.parametrize("saves", ["host", "device"])
@pytest.mark.parametrize(
    "compressor",
    [mpicomp.TopK(ratio=0.1), mpicomp.DGC(ratio=0.1, momentum=0.9), mpicomp.PowerSGD(rank=1), mpicomp.SIDCo(ratio=0.1)],
    ids=str,
)
def test_states_move_between_host_and_device(compressor, saves, loads, cupy):
    """After it was loaded, a run is bit for bit the one that was not interrupted."""
    bring = {"host": lambda value: value, "device": cupy.asarray}
    whole = Ranks(2, compressor)
    for step in range(3):
        stepped(whole, step, bring["host"])
    first, second = Ranks(2, compressor), Ranks(2, compressor)
    for step in range(3):
        stepped(first, step, bring[saves])
    for reducer, state in zip(second.reducers, states(first), strict=True):
        assert all(isinstance(item, np.ndarray) for item in state["residuals"].values())
        reducer.load_state_dict(state)
    for step in range(3, 6):
        np.testing.assert_equal(stepped(second, step, bring[loads]), stepped(whole, step, bring["host"]))
    np.testing.assert_equal(states(second)[0]["residuals"], states(whole)[0]["residuals"])


@pytest.mark.parametrize("compressor", [mpicomp.Dense(), mpicomp.TopK(ratio=0.1)], ids=str)
def test_16_bits_come_back_as_16_bits(compressor, cupy):
    """Residuals are float32."""
    there, here = Ranks(2, compressor), Ranks(2, compressor)
    for step in range(3):
        found = stepped(there, step, cupy.asarray, dtype=np.float16)
        assert {item.dtype for item in found[0].values()} == {np.dtype(np.float16)}
        np.testing.assert_equal(found, stepped(here, step, lambda value: value, dtype=np.float16))
    residual = there.reducers[0].residual("first")
    assert residual.dtype == np.float32
    np.testing.assert_equal(residual, here.reducers[0].residual("first"))


@pytest.mark.parametrize("strided", [False, True])
def test_arrays_of_any_strides(strided, cupy):
    ranks = Ranks(1, "dense")
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    array = cupy.asarray(values)
    given, expected = (array[::2, 1:].transpose(), values[::2, 1:].T) if strided else (array, values)
    [mean] = ranks.reduce([{"w": given}])
    np.testing.assert_array_equal(mean["w"].get(), expected)


@pytest.mark.parametrize("compressor", [mpicomp.Dense(), mpicomp.TopK(ratio=0.1), mpicomp.QSGD()], ids=str)
@pytest.mark.parametrize("policy", ["raise", "skip", "pass"])
def test_what_is_not_finite(compressor, policy, cupy):
    def bad(bring):
        ranks = Ranks(2, compressor, nonfinite=policy, feedback=compressor.contractive)
        stepped(ranks, 0, bring)
        given = [gradients_of(rank, 1) for rank in range(2)]
        given[1]["second"][3] = np.nan
        reported = None
        try:
            reported = ranks.reduce([{name: bring(value) for name, value in item.items()} for item in given])
            reported = [{name: on_host(value) for name, value in item.items()} for item in reported]
        except NonFiniteError as error:
            reported = str(error)
        return reported, [ranks.residuals(name) for name in SHAPES], stepped(ranks, 2, bring)

    np.testing.assert_equal(bad(cupy.asarray), bad(lambda value: value))


def test_clipping_by_the_norm_of_all(cupy):
    there, here = (Ranks(2, mpicomp.DGC(ratio=0.1, clip=1.0)) for _ in range(2))
    for step in range(3):
        np.testing.assert_equal(stepped(there, step, cupy.asarray), stepped(here, step, lambda value: value))


@pytest.mark.parametrize("compressor", [mpicomp.Dense(), mpicomp.TopK(ratio=0.1), mpicomp.OneBit()], ids=str)
def test_ranks_on_host_and_device_together(compressor, cupy):
    mixed, alike = Ranks(3, compressor), Ranks(3, compressor)
    for step in range(3):
        given = [gradients_of(rank, step) for rank in range(3)]
        item = [{name: cupy.asarray(value) for name, value in given[0].items()}, *given[1:]]
        means = mixed.reduce(item)
        assert isinstance(means[0]["first"], fake_cuda.ndarray)
        assert isinstance(means[1]["first"], np.ndarray)
        expected = alike.reduce(given)
        for name in SHAPES:
            np.testing.assert_array_equal(means[0][name].get(), expected[0][name])
            np.testing.assert_array_equal(means[1][name], expected[1][name])


def test_what_another_stream_makes_is_waited_for(cupy):
    """The array names the stream that is current; what is given back can be used in it at once."""
    stream = cupy.driver.stream(0)
    ranks = Ranks(1, mpicomp.TopK(ratio=1.0))
    for step in range(3):
        with cupy.stream(stream):
            given = cupy.asarray(np.full(50, step, np.float32)) + 1
            [means] = ranks.reduce([{"w": given}])
            np.testing.assert_array_equal((means["w"] * 2).get(), np.full(50, 2 * step + 2))


def test_each_array_is_handed_over_in_the_stream_that_makes_it(cupy):
    reducer = Ranks(1, mpicomp.TopK(ratio=1.0)).reducers[0]
    streams = {name: cupy.driver.stream(0) for name in "abc"}
    reducer.reduce({name: cupy.asarray(np.zeros(20, np.float32)) for name in streams})
    with ProgressThread(reducer.transport, channels=1) as thread:
        for step in range(3):
            begun, given = reducer.stream(thread), {}
            for place, (name, stream) in enumerate(streams.items()):
                with cupy.stream(stream):
                    given[name] = cupy.asarray(np.full(20, step, np.float32)) + place
                    begun.put(name, given[name])
            means = begun.finish(given)
            for place, name in enumerate(streams):
                np.testing.assert_array_equal((means[name] * 2).get(), np.full(20, 2 * (step + place)))
    reducer.close()


def test_events_do_not_grow_with_the_number_of_arrays(cupy, monkeypatch):
    """A model of two hundred parameters would wait for two hundred events in a step, else, and as many again."""
    record, counted = cupy.driver.record, []
    monkeypatch.setattr(cupy.driver, "record", lambda *words: (counted.append(words), record(*words))[1])
    recorded = []
    for arrays in (2, 50):
        ranks = Ranks(1, mpicomp.TopK(ratio=0.1))
        for step in range(3):
            counted.clear()
            values = np.random.default_rng(step).standard_normal((arrays, 100 // arrays), np.float32)
            ranks.reduce([{str(place): cupy.asarray(value) for place, value in enumerate(values)}])
        recorded.append(len(counted))
    assert recorded[0] == recorded[1]


def test_the_joint_choice_surveys_arrays_of_a_device(cupy):
    """What it chooses depends on what it measures; all ranks get the same, and nothing is lost."""
    ranks, given, means = Ranks(2), np.zeros(600), np.zeros(600)
    for step in range(6):
        reported = stepped(ranks, step, cupy.asarray)
        np.testing.assert_equal(reported[0], reported[1])
        given += sum(gradients_of(rank, step)["first"].reshape(-1) for rank in range(2))
        means += 2.0 * reported[0]["first"].reshape(-1)
    np.testing.assert_allclose(given, means + ranks.residual_sum("first").reshape(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", ["gravac", "lgreco", "flexible"])
def test_policies_survey_arrays_of_a_device(policy, cupy):
    compressor = {"lgreco": mpicomp.TopK(ratio=0.1)}.get(policy)
    there, here = (Ranks(2, compressor, policy=policy) for _ in range(2))
    for step in range(6):
        np.testing.assert_equal(stepped(there, step, cupy.asarray), stepped(here, step, lambda value: value))


@pytest.mark.parametrize("compressor", [mpicomp.PowerSGD(rank=1), mpicomp.LGC(ratio=0.3, code="linear")], ids=str)
def test_algebra_of_its_own_is_not_mixed(compressor, cupy):
    """A library's matrix products have other bits on a GPU than on the host: all ranks refuse it."""
    ranks = Ranks(2, compressor)
    given = [gradients_of(rank, 0) for rank in range(2)]
    given[0] = {name: cupy.asarray(value) for name, value in given[0].items()}
    with pytest.raises(DisagreementError, match=r"where gradients are, .* got a GPU on rank 0 and the host on rank 1"):
        ranks.reduce(given)
    for means in ranks.reduce([gradients_of(rank, 0) for rank in range(2)]):
        assert isinstance(means["first"], np.ndarray)


def test_a_thread_exchanges_what_other_streams_still_compute(cupy):
    """The thread has a current device and stream of its own; what counts is those of the thread that made an array."""
    reducer = Ranks(1, mpicomp.TopK(ratio=1.0), bucket_bytes=80).reducers[0]
    stream = cupy.driver.stream(0)
    with ProgressThread(reducer.transport, channels=1) as thread:
        for step in range(4):
            with cupy.stream(stream):
                given = {name: cupy.asarray(np.full(20, step + 1, np.float32)) * 3 for name in "abc"}
                begun = reducer.stream(thread)
                assert (begun is None) == (step == 0)
                if begun is None:
                    means = reducer.reduce(given)
                else:
                    for name, item in given.items():
                        begun.put(name, item)
                    means = begun.finish(given)
                for mean in means.values():
                    np.testing.assert_array_equal((mean + 1).get(), np.full(20, 3 * step + 4))
    reducer.close()
