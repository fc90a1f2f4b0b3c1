"""UpdateOptimizer with the settings of published methods, against their definitions."""

import numpy as np
import oracle
import pytest
import scipy.fft

torch = pytest.importorskip("torch")

from local_replicas import ByHand, Updates, loss_of, sgd  # noqa: E402


@pytest.mark.parametrize(
    "outer", [{"lr": 0.7, "momentum": 0.9, "nesterov": True}, {"lr": 0.5}, {"lr": 0.8, "momentum": 0.5}], ids=str
)
def test_outer_optimizer_is_diloco(outer):
    """DiLoCo by hand: Nesterov's momentum as Sutskever's form has it in torch, of the mean change."""
    ranks, plain = Updates(2, compressor="dense", sync_every=3, outer=outer), ByHand(2)
    velocity = np.zeros(plain.shared.size)
    momentum = outer.get("momentum", 0.0)
    for number in range(12):
        ranks.step(number)
        plain.step(number)
        if number % 3 == 2:
            mean = np.mean(plain.changes(), axis=0)
            velocity = momentum * velocity + mean
            direction = mean + momentum * velocity if outer.get("nesterov") else velocity
            plain.set_all(plain.shared + outer["lr"] * direction)
    np.testing.assert_allclose(ranks.values()[0], plain.shared, rtol=1e-9, atol=1e-12)


def matrix():
    torch.manual_seed(5)
    return torch.nn.Linear(9, 7, bias=False).double()  # 63 elements, which are a bucket


def largest_of_chunks(array, chunk, ratio):
    """The array with zeros where it is not among the largest of its chunk, by the definition."""
    chosen = np.zeros(array.size)
    for start in range(0, array.size, chunk):
        part = array[start : start + chunk]
        for place in oracle.largest(part, oracle.kept(ratio, part.size)):
            chosen[start + place] = part[place]
    return chosen


def test_sparseloco_by_hand():
    """Arxiv 2508.15706 by hand: residuals decay, chunks are selected from, and the mean is over ranks, not senders."""
    settings = {"compressor": {"id": "chunktopk", "ratio": 0.1, "chunk": 16}, "feedback_decay": 0.95}
    ranks = Updates(3, make=matrix, sync_every=4, outer={"lr": 0.8}, **settings)
    plain, residuals = ByHand(3, make=matrix), np.zeros((3, 63))
    for number in range(12):
        ranks.step(number)
        plain.step(number)
        if number % 4 == 3:
            residuals = 0.95 * residuals + plain.changes()
            sent = np.array([largest_of_chunks(residual, 16, 0.1) for residual in residuals])
            residuals -= sent
            plain.set_all(plain.shared + 0.8 * sent.mean(axis=0))
            np.testing.assert_allclose(ranks.values()[0], plain.shared, rtol=1e-9, atol=1e-12)
    assert ranks.same()


def test_sparseloco_learns_with_two_bits_an_element():
    """Rounded values of a decaying residual: nothing grows, and the loss falls as it does with values as they are."""
    losses = []
    for wire in (None, "q2"):
        compressor = {"id": "chunktopk", "ratio": 0.1, "chunk": 16, "wire": wire}
        ranks = Updates(2, make=matrix, sync_every=4, outer={"lr": 0.8}, compressor=compressor, feedback_decay=0.95)
        before = loss_of(ranks.models[0], 0, 10**6).item()
        ranks.run(range(200))
        losses.append(loss_of(ranks.models[0], 0, 10**6).item() / before)
    assert max(losses) < 0.3
    assert losses[1] < 2 * losses[0]


def test_demo_by_hand():
    """Arxiv 2411.19870 by hand: momentum that decays, coefficients of 2 x 2 elements, a step along their signs."""

    def transformed(array, transform):
        whole = transform(array[:60].reshape(15, 2, 2), axes=(1, 2), norm="ortho").reshape(-1)
        return np.concatenate([whole, transform(array[60:62], norm="ortho"), array[62:]])

    ranks = Updates(
        3,
        sgd,
        make=matrix,
        compressor={"id": "dcttopk", "ratio": 0.5, "side": 2},
        feedback_decay=0.999,
        outer={"sign": True, "lr": 0.5},
    )
    plain, memory = ByHand(3, sgd, make=matrix), np.zeros((3, 63))
    for number in range(8):
        ranks.step(number)
        plain.step(number)
        memory = 0.999 * memory + plain.changes()  # changes are -lr g
        coefficients = [transformed(array, scipy.fft.dctn) for array in memory]
        chosen = np.array([largest_of_chunks(array, 4, 0.5) for array in coefficients])
        memory -= [transformed(array, scipy.fft.idctn) for array in chosen]
        sign = np.sign(transformed(chosen.mean(axis=0), scipy.fft.idctn))
        plain.set_all(plain.shared + 0.5 * 0.1 * sign)  # times the rate of the inner optimizer
        np.testing.assert_allclose(ranks.values()[0], plain.shared, rtol=1e-9, atol=1e-12)


def test_no_exchange_is_dense_where_signs_are_taken():
    ranks = Updates(3, sgd, make=matrix, compressor="topk", warmup=None, outer={"sign": True, "lr": 0.5})
    for number in range(3):
        ranks.step(number)
        [bucket] = ranks.optimizers[0].reducers[0].last_step.buckets
        assert (bucket.compressor["id"], bucket.collective) == ("topk", "allgather")
