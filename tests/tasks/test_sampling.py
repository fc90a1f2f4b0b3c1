import numpy as np
import pytest
from mpicomp.bench.tasks.sampling import Sampler, Shards

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_epoch_has_each_sample_at_most_once(ranks):
    sampler = Sampler("t", samples=100, batch=4, seed=3)
    steps = 100 // (4 * ranks)
    for epoch in range(3):
        seen = np.concatenate(
            [sampler.indices(epoch * steps + step, rank, ranks) for step in range(steps) for rank in range(ranks)]
        )
        assert len(np.unique(seen)) == len(seen) == steps * ranks * 4
        assert seen.min() >= 0
        assert seen.max() < 100


def test_order_follows_seed_and_epoch():
    first = Sampler("t", samples=100, batch=100, seed=0)
    assert (first.indices(0, 0, 1) == Sampler("t", 100, 100, seed=0).indices(0, 0, 1)).all()
    assert (first.indices(0, 0, 1) != first.indices(1, 0, 1)).any()
    assert (first.indices(0, 0, 1) != Sampler("t", 100, 100, seed=1).indices(0, 0, 1)).any()


def test_asking_again_gives_the_same():
    sampler = Sampler("t", samples=20, batch=5, seed=0)
    early = sampler.indices(0, 0, 2).copy()
    sampler.indices(7, 1, 2)
    assert (sampler.indices(0, 0, 2) == early).all()


def test_ranks_beyond_the_samples_are_refused():
    with pytest.raises(ValueError, match=r"t: 20 training samples are too few for 5 ranks .* at most 4 ranks"):
        Sampler("t", samples=20, batch=5, seed=0).indices(0, 0, 5)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range(rank):
    with pytest.raises(ValueError, match=r"t: rank must be in 0\.\.1"):
        Sampler("t", samples=20, batch=5, seed=0).indices(0, rank, 2)


LABELS = np.random.default_rng(5).choice(10, 2000, p=np.arange(1, 11) / 55)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 10])
def test_shards_are_of_different_classes(ranks):
    shards = Shards("t", LABELS, batch=4, seed=3)
    for rank in range(ranks):
        assert set(LABELS[shards.part(rank, ranks)]) == set(range(rank, 10, ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 10, 13, 40])
@pytest.mark.parametrize("groups", [LABELS, LABELS * 7 - 3, np.zeros(2000, int)])
def test_samples_are_in_one_shard_each(ranks, groups):
    shards = Shards("t", groups, batch=1, seed=3)
    parts = [shards.part(rank, ranks) for rank in range(ranks)]
    assert sorted(np.concatenate(parts)) == list(range(2000))
    if ranks > 10:
        assert all(len(set(groups[part])) == 1 for part in parts)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_of_one_group_are_blocks(ranks):
    shards = Shards("t", np.zeros(101, int), batch=1, seed=3)
    parts = [shards.part(rank, ranks) for rank in range(ranks)]
    assert np.concatenate(parts).tolist() == list(range(101))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_epoch_of_a_shard_has_samples_at_most_once(ranks):
    shards = Shards("t", LABELS, batch=4, seed=3)
    for rank in range(ranks):
        part = shards.part(rank, ranks)
        steps = len(part) // 4
        first, second = (
            np.concatenate([shards.indices(epoch * steps + step, rank, ranks) for step in range(steps)])
            for epoch in range(2)
        )
        for seen in (first, second):
            assert len(np.unique(seen)) == len(seen) == steps * 4
            assert set(seen) <= set(part)
        assert (first != second).any()


def test_shards_are_the_same_in_any_order():
    one, other = Shards("t", LABELS, 4, seed=3), Shards("t", LABELS, 4, seed=3)
    reported = [one.indices(step, rank, 3).tolist() for step in range(5) for rank in range(3)]
    assert [other.indices(step, 2, 3).tolist() for step in reversed(range(5))] == reported[2::3][::-1]
    assert other.indices(0, 0, 2).tolist() == Shards("t", LABELS, 4, seed=3).indices(0, 0, 2).tolist()
    assert other.indices(0, 0, 3).tolist() == reported[0]
    assert Shards("t", LABELS, 4, seed=4).indices(0, 0, 3).tolist() != reported[0]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_small_shard_is_refused_on_all_ranks(rank):
    shards = Shards("t", np.array([0] * 9 + [1] * 9 + [2] * 4), batch=5, seed=0)
    text = r"t: with shards some rank of 3 has 4 training samples, too few for a batch of 5: fewer ranks, or more data"
    with pytest.raises(ValueError, match=text):
        shards.indices(0, rank, 3)
    assert len(shards.indices(0, 0, 2)) == 5


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range_of_shards(rank):
    with pytest.raises(ValueError, match=r"t: rank must be in 0\.\.1"):
        Shards("t", LABELS, 5, seed=0).indices(0, rank, 2)
