"""The study of how far compressed training is behind: its estimates, against trainings that are made of known parts."""

import json

import behind
import numpy as np
import pytest
from marks import slow

pytest.importorskip("torch")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_a_training_that_is_slower_by_a_share_is_behind_by_that(share):
    steps = np.arange(200)
    noise = np.random.default_rng(0).normal(scale=0.2, size=200)  # of batches, which are the same

    def losses(done):
        return np.exp(2 - 0.02 * done + noise)

    assert behind.steps_behind(losses(steps), losses((1 - share) * steps)) == pytest.approx(share, abs=0.03)


def waited(signal, wait, steps=20_000):
    """Give how much less Adam does for elements that are sent every so many steps, and the delay of their energy."""
    random, numel = np.random.default_rng(0), 40
    means = random.choice([-1.0, 1.0], numel) * signal**0.5
    went, residual, lost, energy = [0.0, 0.0], np.zeros(numel), 0.0, 0.0
    firsts, squares = np.zeros((2, numel)), np.zeros((2, numel))
    for step in range(steps):
        gradient = means + (1 - signal) ** 0.5 * random.standard_normal(numel)
        residual = residual + gradient
        sent = np.where(np.arange(numel) % wait == step % wait, residual, 0.0)
        residual = residual - sent
        lost, energy = lost + (residual**2).sum(), energy + (sent**2).sum()
        for own, arrived in enumerate((gradient, sent)):
            firsts[own] += 0.1 * (arrived - firsts[own])
            squares[own] += 0.001 * (arrived**2 - squares[own])
            if step > steps // 2:
                went[own] += (firsts[own] / np.sqrt(squares[own])) @ means
    return 1 - went[1] / went[0], lost / energy


@pytest.mark.parametrize(("signal", "wait"), [(0.1, 10), slow(0.02, 10), slow(0.1, 40), slow(0.5, 4)])
def test_what_adam_loses_where_elements_wait(signal, wait):
    """A second moment that is larger by ``1 + (wait - 1) signal`` takes its root of every step."""
    measured, delay = waited(signal, wait)
    assert measured == pytest.approx(1 - (1 + (wait - 1) * signal) ** -0.5, abs=0.04)
    assert behind.by_delay(delay, signal) < measured  # energy waits for less than elements do


def test_elements_that_are_alike_wait_as_long_as_their_ratio_says():
    scales, signals = np.ones(1000), np.full(1000, 0.2)
    for ratio in (0.01, 0.05, 0.5):
        expected = 1 - (1 + (1 / ratio - 1) * 0.2) ** -0.5
        assert behind.by_waits(scales, signals, ratio) == pytest.approx(expected, rel=1e-3)
    assert behind.by_waits(scales, signals, 1.0) == pytest.approx(0.0, abs=1e-6)


def test_scales_and_signals_are_those_of_gradients():
    random, elements = np.random.default_rng(1), behind.Elements(4000)
    scales = np.where(np.arange(4000) % 2, 10.0, 0.1)
    means = scales * np.where(np.arange(4000) % 2, 0.3, 0.9) ** 0.5 * random.choice([-1, 1], 4000)
    for _ in range(300):
        noise = scales * np.where(np.arange(4000) % 2, 0.7, 0.1) ** 0.5
        elements.see(means + noise * random.standard_normal(4000))
    found, signals = elements.scales_and_signals()
    assert np.median(found / scales) == pytest.approx(1, rel=0.1)
    assert signals[1::2].mean() == pytest.approx(0.3, abs=0.05)
    assert signals[::2].mean() == pytest.approx(0.9, abs=0.05)
    assert elements.signal == pytest.approx(0.3, abs=0.05)  # of energy, which the large ones have


@pytest.mark.slow
def test_a_row_is_made_once(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    words = ["--steps", "24", "--exchange", "topk:0.05", "--rows", str(path)]
    for _ in range(2):
        assert behind.run(behind.parser().parse_args(words)) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["exchange"] for row in rows] == ["dense", "topk:0.05"]
    assert rows[0]["delay"] == rows[0]["by_delay"] == 0.0
    assert "topk:0.05" in capsys.readouterr().out
