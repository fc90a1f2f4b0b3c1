"""The exchange of learned codes against one written out slowly, with a code that is easy to follow."""

import numpy as np
import oracle
import pytest
from marks import slow
from worlds import Ranks

import mpicomp
from mpicomp.collectives import bind
from mpicomp.errors import MpicompError
from mpicomp.mpi import LocalWorld

DENSE, LEARNING = 2, 3  # steps
SHAPES = {
    "out.bias": (4,),
    "out.weight": (4, 10),
    "mid2.weight": (30, 20),
    "mid1.weight": (25, 16),
    "in.weight": (3, 3),
}
LAYERS = [("out", 44, "sparse"), ("mid2", 600, "coded"), ("mid1", 400, "coded"), ("in", 9, "dense")]
RATIO = 0.1


class Halves:
    """The mean of every two values; a decoder repeats it, times what was learned and something of the rank's own."""

    least = 10

    def __init__(self, workspace, seed=0):
        self.gain, self.decoders, self.seen = 0.0, 1, []

    def length(self, count):
        return -(-count // 2)

    def begin_step(self, step):
        pass

    def encode(self, values, out):
        for place in range(out.size):
            out[place] = values[2 * place : 2 * place + 2].sum() / 2

    def decode(self, code, out, worker=0):
        out[:] = np.repeat(code, 2)[: out.size] * self.gain * (1 + worker / 8)

    def decode_near(self, code, centre, out, out_centre):
        self.decode(code, out)
        self.decode(centre, out_centre)

    def learn(self, values, leader=None):
        self.seen.append((values.copy(), leader))
        self.gain += 0.25
        self.decoders = 1 if leader is None else len(values)
        return 1 - self.gain

    def size(self, ranks):
        return ranks

    def weights(self):
        return np.full(self.decoders, self.gain, np.float32)

    def use(self, weights):
        self.gain = float(weights[0])

    def state(self):
        return {"gain": self.gain, "decoders": self.decoders}

    def load(self, state):
        self.gain, self.decoders = (state["gain"], state["decoders"]) if state else (0.0, 1)


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Give LGC that code; gives the codes that were made."""
    codes = []

    def make(self, workspace, seed=0):
        codes.append(Halves(workspace, seed))
        return codes[-1]

    monkeypatch.setattr(mpicomp.LGC, "make_code", make)
    return codes


class Slow:
    """Every rank's step, one number after the other, in float64."""

    def __init__(self, compressor, ranks):
        self.compressor, self.ranks, self.steps = compressor, ranks, 0
        self.residuals = [np.zeros(sum(size for _, size, _ in LAYERS)) for _ in range(ranks)]
        self.learned, self.energy, self.lost = [], 0.0, 0.0
        self.errors = []  # of each rank's decoded values in this step, as shares of the energy of the exact ones

    @staticmethod
    def selection(values):
        """Return the elements that a rank with these values would send, and of each layer those that are coded."""
        listed, coded, start = [], [], 0
        for _, size, travels in LAYERS:
            part = range(start, start + size)
            if travels != "dense":
                largest = oracle.largest(np.abs(values[start : start + size]), oracle.kept(RATIO, size))
                part = sorted(start + place for place in largest)
            if travels == "coded":
                coded.append(part)
            listed += part
            start += size
        return listed, coded

    def step(self, gradients):
        everyones = [residual + gradient for residual, gradient in zip(self.residuals, gradients, strict=True)]
        leader = int(np.random.default_rng([0, self.steps, 0]).integers(self.ranks))
        learns = DENSE <= self.steps < DENSE + LEARNING
        selects_alone = self.compressor.published and learns  # then each rank sends its own largest values
        selected = [self.selection(values if selects_alone else everyones[leader]) for values in everyones]
        listed, layers = zip(*selected, strict=True)
        leaders = [everyones[leader][part] for part in layers[leader]]
        signs = [np.where(self.compressor.signs & (part < 0), -1, 1) for part in leaders]
        frame = np.concatenate([s * np.sqrt(np.mean(part**2)) for s, part in zip(signs, leaders, strict=True)])
        coded = [np.concatenate(parts) for parts in layers]
        if self.steps < DENSE:
            listed = [range(everyones[0].size)] * self.ranks
        sent = [np.zeros_like(values) for values in everyones]
        for part, values, places in zip(sent, everyones, listed, strict=True):
            part[places] = values[places]
        if learns:
            values = [values[places] / frame for values, places in zip(everyones, coded, strict=True)]
            self.learned.append((np.array(values), leader))
        elif self.steps >= DENSE:
            shares = self.decoded(everyones, coded[leader], frame, leader)
            exact = [values[coded[leader]] for values in everyones]
            self.errors = [
                np.sum(np.square(values - share)) / (values @ values)
                for values, share in zip(exact, shares, strict=True)
            ]
            for part, places, share in zip(sent, coded, shares, strict=True):
                part[places] = share
        self.energy = sum(values @ values for values in everyones)
        self.lost = sum(np.sum(np.square(values - part)) for values, part in zip(everyones, sent, strict=True))
        mean = sum(sent) / self.ranks
        if self.compressor.error == "selected":
            for part, values, places in zip(sent, everyones, listed, strict=True):
                part[places] = values[places]
        self.residuals = [values - part for values, part in zip(everyones, sent, strict=True)]
        self.steps += 1
        return mean

    def decoded(self, everyones, coded, frame, leader):
        """Return what is sent of each rank's coded values."""
        gain, published = 0.25 * LEARNING, self.compressor.published
        relative = [np.clip(values[coded] / frame, -100, 100) for values in everyones]
        codes = [[sum(entry[at : at + 2]) / 2 for at in range(0, len(entry), 2)] for entry in relative]
        if self.compressor.instance == "ring":
            shares = [np.repeat(code, 2)[: len(coded)] * gain * frame for code in codes]
            match = sum(values[coded] @ share for values, share in zip(everyones, shares, strict=True))
            factor = 1 if published else max(0.0, match / sum(share @ share for share in shares))
            return [factor * share for share in shares]
        shares = []
        for rank, values in enumerate(everyones):
            share = np.repeat(codes[leader], 2)[: len(coded)] * gain * (1 + rank / 8) * frame
            if not published:
                share = max(0.0, values[coded] @ share / (share @ share)) * share
            count = oracle.kept(self.compressor.innovation, len(coded))
            for place in oracle.largest(np.abs(values[coded] - share), count):
                share[place] = values[coded[place]]
            shares.append(share)
        return shares


def flat(arrays):
    return np.concatenate([arrays[name].ravel() for name in SHAPES])


def cut(array):
    parts, start = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        parts[name] = array[start : start + size].reshape(shape)
        start += size
    return parts


def gradients(rng, ranks):
    common = rng.standard_t(3, size=sum(size for _, size, _ in LAYERS))
    return [common + 0.5 * rng.standard_t(3, size=common.size) for _ in range(ranks)]


SETTINGS = [
    {"instance": "ring"},
    {"instance": "ring", "signs": False},
    {"instance": "ring", "error": "selected"},
    {"instance": "server"},
    {"instance": "server", "innovation": 0.5, "signs": False},
    {"instance": "server", "error": "selected"},
    {"instance": "ring", "as_published": True},
    slow({"instance": "server", "as_published": True}),
]


def lgc(**settings):
    phases = {"ratio": RATIO, "dense_steps": DENSE, "training_steps": LEARNING}
    return mpicomp.get_compressor({"id": "lgc"} | phases | settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("ranks", [1, slow(2), 3, slow(4)])
@pytest.mark.parametrize("inner", ["allreduce", "ring"])
def test_learned_exchange_equals_the_reference(settings, ranks, inner, made):
    compressor = lgc(**settings)
    members, slow = Ranks(ranks, compressor, f"learned:{inner}"), Slow(compressor, ranks)
    rng = np.random.default_rng(ranks)
    for _ in range(DENSE + LEARNING + 6):
        given = gradients(rng, ranks)
        means = members.reduce([cut(array) for array in given])
        expected = slow.step(given)
        for mean in means:
            assert flat(mean).tobytes() == flat(means[0]).tobytes()
        np.testing.assert_allclose(flat(means[0]), expected, rtol=1e-9, atol=1e-11)
        for reducer, residual in zip(members.reducers, slow.residuals, strict=True):
            held = np.concatenate([reducer.residual(name).ravel() for name in SHAPES])
            np.testing.assert_allclose(held, residual, rtol=1e-9, atol=1e-11)
            assert reducer.last_step.buckets[0].gain == pytest.approx(1 - slow.lost / slow.energy, abs=1e-9)
        learning = 1 - len(slow.learned) / 4 if len(slow.learned) else None  # on the trainer alone
        expected = slow.errors or [learning] + [None] * (ranks - 1)
        assert [memory(reducer)["error"] for reducer in members.reducers] == pytest.approx(expected, abs=1e-9)
    [trained] = [code for code in made if code.seen]
    assert len(trained.seen) == LEARNING
    for (values, leader), (expected, expected_leader) in zip(trained.seen, slow.learned, strict=True):
        np.testing.assert_allclose(values, np.clip(expected, -100, 100), rtol=1e-12)
        assert leader == (expected_leader if compressor.instance == "server" else None)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("ranks", [1, slow(2), 3, slow(4)])
@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
def test_bytes_executed_are_those_of_rounds_in_every_phase(settings, ranks, dtype):
    world = LocalWorld(ranks)
    reducers = [mpicomp.Reducer(lgc(**settings), "learned", comm=end) for end in world.transports]
    rng = np.random.default_rng(0)
    for step in range(DENSE + LEARNING + 3):
        given = [cut(array.astype(dtype)) for array in gradients(rng, ranks)]
        world.run([reducer.rounds(arrays) for reducer, arrays in zip(reducers, given, strict=True)])
        if step == 0:
            continue  # ranks agree first
        placed = lgc(**settings).bind(list(SHAPES), [int(np.prod(shape)) for shape in SHAPES.values()])
        scheme = bind(placed, "learned")
        for end in world.transports:
            expected = scheme.rounds(1053, np.dtype(dtype), end.group, step)
            record = reducers[end.group.rank].last_step
            log = record.exchanges[0].log
            assert [entry.operation for entry in log] == [task.operation for task in expected]
            for what in ("sent_bytes", "wire_bytes"):
                assert [getattr(entry, what) for entry in log] == [getattr(task, what)(end.group) for task in expected]
            once = [task for task in expected if task.once]
            assert len(once) == (step == DENSE + LEARNING)
            assert record.once_wire_bytes == sum(task.wire_bytes(end.group) for task in once)
            assert record.wire_bytes == sum(task.wire_bytes(end.group) for task in expected if not task.once)


def memory(reducer):
    return reducer.state_dict()["memories"]["out.bias"]["lgc"]


@pytest.mark.parametrize("instance", ["ring", "server"])
@pytest.mark.parametrize("at", [1, DENSE, DENSE + 1, DENSE + LEARNING, DENSE + LEARNING + 2])
def test_it_resumes_in_the_middle_of_every_phase(instance, at):
    members, again = Ranks(3, lgc(instance=instance), seed=5), Ranks(3, lgc(instance=instance), seed=5)
    rng = np.random.default_rng(0)
    steps = [[cut(array) for array in gradients(rng, 3)] for _ in range(DENSE + LEARNING + 4)]
    for step in steps[:at]:
        members.reduce(step)
    for reducer, other in zip(members.reducers, again.reducers, strict=True):
        other.load_state_dict(reducer.state_dict())
    for step in steps[at:]:
        expected = flat(members.reduce(step)[0]).tobytes()
        assert flat(again.reduce(step)[0]).tobytes() == expected


@pytest.mark.parametrize("instance", ["ring", "server"])
@pytest.mark.parametrize("at", [1, DENSE, DENSE + 1, DENSE + LEARNING, DENSE + LEARNING + 1])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_learned_step_that_is_undone_does_not_count(instance, at, bad, made):
    members = Ranks(2, lgc(instance=instance), nonfinite="skip")
    rng = np.random.default_rng(1)
    for step in range(DENSE + LEARNING + 3):
        given = [cut(array) for array in gradients(rng, 2)]
        if step == at:
            before = [reducer.state_dict() for reducer in members.reducers]
            for culprit in range(2):
                spoilt = [{name: array.copy() for name, array in one.items()} for one in given]
                spoilt[culprit]["mid1.weight"][3, 4] = bad
                means = members.reduce(spoilt)
                assert not any(flat(mean).any() for mean in means)
            for reducer, state in zip(members.reducers, before, strict=True):
                np.testing.assert_equal(memory(reducer), state["memories"]["out.bias"]["lgc"])
                assert reducer.residual("mid1.weight").tobytes() == state["residuals"]["mid1.weight"].tobytes()
        means = members.reduce(given)
        assert np.isfinite(flat(means[0])).all()
    [trained] = [code for code in made if code.seen]
    assert len(trained.seen) == LEARNING


@pytest.mark.parametrize("at", [DENSE + 1, DENSE + LEARNING, DENSE + LEARNING + 1])
def test_a_step_that_has_to_agree_first_counts_once(at, made):
    members = Ranks(2, lgc())
    rng = np.random.default_rng(2)
    for step in range(DENSE + LEARNING + 3):
        given = [cut(array) for array in gradients(rng, 2)]
        absent = ["in.weight"] if step == at else []
        runs = [reducer.rounds(arrays, absent=absent) for reducer, arrays in zip(members.reducers, given, strict=True)]
        members.world.run(runs)
        assert memory(members.reducers[1])["steps"] == step + 1
    assert sum(len(code.seen) for code in made) == LEARNING


def test_a_bucket_of_other_layers_begins_anew():
    members = Ranks(2, lgc())
    rng = np.random.default_rng(3)
    for _ in range(DENSE + LEARNING + 2):
        members.reduce([cut(array) for array in gradients(rng, 2)])
    wider = [cut(array) | {"first.weight": rng.normal(size=(40, 40))} for array in gradients(rng, 2)]
    for mean in members.reduce(wider):
        assert mean["first.weight"].shape == (40, 40)
    record = members.reducers[0].last_step.buckets[0]
    assert record.reason.endswith("lgc: dense")
    assert memory(members.reducers[0])["steps"] == 1


def test_a_code_for_each_rank_is_learned_again_among_others():
    for instance, steps in (("ring", DENSE + LEARNING + 2), ("server", 1)):
        three, two = Ranks(3, lgc(instance=instance)), Ranks(2, lgc(instance=instance))
        rng = np.random.default_rng(4)
        for _ in range(DENSE + LEARNING + 1):
            three.reduce([cut(array) for array in gradients(rng, 3)])
        for reducer, other in zip(three.reducers, two.reducers, strict=False):
            other.load_state_dict(reducer.state_dict())
        two.reduce([cut(array) for array in gradients(rng, 2)])
        assert memory(two.reducers[0])["steps"] == steps


def test_learned_trainer_without_state_raises():
    members, again = Ranks(2, lgc()), Ranks(2, lgc())
    rng = np.random.default_rng(5)
    for _ in range(DENSE + LEARNING):
        members.reduce([cut(array) for array in gradients(rng, 2)])
    for other in again.reducers:
        other.load_state_dict(members.reducers[1].state_dict())
    with pytest.raises(MpicompError, match="each rank has to load the state that it saved"):
        again.reduce([cut(array) for array in gradients(rng, 2)])


def test_few_values_stay_sparse_and_the_record_says_why():
    members = Ranks(2, mpicomp.LGC(ratio=0.001, dense_steps=DENSE, training_steps=LEARNING))
    rng = np.random.default_rng(6)
    for _ in range(DENSE + LEARNING + 2):
        members.reduce([cut(array) for array in gradients(rng, 2)])
    record = members.reducers[0].last_step.buckets[0]
    assert record.rounds == ["bcast", "allreduce"]
    assert record.reason.endswith("lgc: no code, which takes 10 values, and 2 are selected")
    assert record.ratio_reached == (3 + 9) / 1053


@pytest.mark.parametrize("instance", ["ring", "server"])
def test_learned_results_equal_on_ranks_that_round_differently(instance):
    members = Ranks(3, lgc(instance=instance), identical_sums=False)
    rng = np.random.default_rng(7)
    for _ in range(DENSE + LEARNING + 3):
        means = members.reduce([cut(array.astype(np.float32)) for array in gradients(rng, 3)])
        assert len({flat(mean).tobytes() for mean in means}) == 1


@pytest.mark.mpi
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_over_mpi(comm, settings):
    compressor = lgc(**settings)
    reducer = mpicomp.Reducer(compressor, "learned", comm=comm)
    slow, rng = Slow(compressor, comm.size), np.random.default_rng(9)
    for _ in range(DENSE + LEARNING + 3):
        given = gradients(rng, comm.size)
        mean = flat(reducer.reduce(cut(given[comm.rank])))
        np.testing.assert_allclose(mean, slow.step(given), rtol=1e-9, atol=1e-11)
        assert len(set(comm.allgather(mean.tobytes()))) == 1
    reducer.close()
