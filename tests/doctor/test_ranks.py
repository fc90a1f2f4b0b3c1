import itertools
import random

from doctor.ranks import rank

from mpicomp.doctor.ranks import by_host, difference_problems, named, spans


def expanded(text):
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def test_spans_read_back_are_the_numbers():
    rng = random.Random(5)
    for _ in range(200):
        numbers = rng.sample(range(40), rng.randint(1, 40))
        text = spans(numbers)
        assert expanded(text) == sorted(numbers)
        # As short as it gets: no part begins where another one ends.
        edges = [(int(part.split("-")[0]), int(part.split("-")[-1])) for part in text.split(",")]
        assert all(one[1] + 1 < other[0] for one, other in itertools.pairwise(edges))


def test_ranks_are_named():
    assert named([rank(3)]) == "rank 3"
    assert named([rank(0), rank(1), rank(5)]) == "ranks 0-1,5"


def test_two_hosts_of_the_same_name_are_two():
    ranks = [rank(0), rank(1, leader=1), rank(2), rank(3, leader=1)]
    assert [[one.rank for one in here] for here in by_host(ranks)] == [[0, 2], [1, 3]]


def test_hosts_with_different_environments():
    assert difference_problems([rank(0), rank(1)]) == []
    [problem] = difference_problems([rank(0), rank(1), rank(2, host="b", versions={"numpy": "2"})])
    assert problem.what == "ranks differ in numpy: 1 on a, 2 on b"
    [problem] = difference_problems([rank(0), rank(1, host="b", versions={"mpi_version": None})])
    assert problem.what == "ranks differ in mpi version: 1 on a, None on b"
