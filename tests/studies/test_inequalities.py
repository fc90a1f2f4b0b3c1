"""Costs and inequalities of Flexible Communication against the figures of its paper."""

import numpy as np
import pytest
from flexible_search import published_choice, sparse_sum

MODELS = {"ResNet18": 11_689_512, "ResNet50": 25_557_032, "AlexNet": 61_100_840, "ViT": 133_000_000}
"""Parameters; of ViT those that the printed figures imply."""
PRINTED_VI = {
    ("ResNet18", 10): ((54, 7.66, 3.28), (35, 18.1, 16.7), (43.2, 12.2, 9)),
    ("ResNet18", 1): ((526.3, 51.93, 8.86), (194.7, 34.1, 19.5), (345.6, 41.9, 12.8)),
    ("ResNet50", 10): ((115.1, 14.35, 4.65), (52.9, 20.3, 18.1), (83.4, 15.9, 10)),
    ("ResNet50", 1): ((1148, 126.5, 14.35), (405.5, 58.8, 21), (745, 83.7, 16.1)),
    ("AlexNet", 10): ((271.8, 32.73, 6), (106.8, 25.2, 18.6), (180.4, 25.8, 11.1)),
    ("AlexNet", 1): ((2718.7, 282.7, 31.33), (964.4, 111.8, 27), (1778, 186.8, 27.3)),
    ("ViT", 10): ((592.77, 68.48, 9.15), (238.6, 36.2, 19.2), (401.2, 46.2, 12.9)),
    ("ViT", 1): ((5973, 601.8, 59.68), (2047, 222.8, 36.7), (3852, 385.2, 44.4)),
}
"""Milliseconds of table VI at 1 ms, by model and Gbit/s: of allgather, ring and tree at the ratios."""
RATIOS = (0.1, 0.01, 0.001)
RANKS = 8
KINDS = ("allgather", "ring", "tree")
# The one printed figure that is further than a tenth from what the paper's own formula gives, which is a ninth less.
FAR = ("ResNet50", 10, 0.001)


@pytest.mark.parametrize("cell", PRINTED_VI, ids=str)
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_papers_table(cell, ratio):
    model, gbits = cell
    kept, per_byte = 4 * MODELS[model] * ratio, 8 / (gbits * 1e9)
    printed = [times[RATIOS.index(ratio)] for times in PRINTED_VI[cell]]
    ours = [1e3 * sparse_sum(kind, RANKS, kept).seconds(1e-3, per_byte) for kind in KINDS]
    assert ours == pytest.approx(printed, rel=0.12 if (*cell, ratio) == FAR else 0.10)
    assert published_choice(RANKS, kept, 1e-3, per_byte) == KINDS[int(np.argmin(printed))]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 31])
def test_the_inequalities_name_the_least_cost(ranks):
    """Against the costs of table I, written out, on links and sizes from all orders of magnitude."""
    random, seen = np.random.default_rng(0), set()
    for latency, per_byte, kept in 10 ** random.uniform((-6, -11, 1), (0, -6, 9), (300, 3)):
        depth = np.log2(ranks)
        costs = {
            "allgather": latency * depth + 2 * kept * per_byte * (ranks - 1),
            "ring": latency * (2 * (ranks - 1) + depth) + kept * per_byte * (2 * (ranks - 1) / ranks + depth),
            "tree": 3 * latency * depth + 3 * kept * per_byte * depth,
        }
        found = published_choice(ranks, kept, latency, per_byte)
        assert costs[found] <= min(costs.values()) * (1 + 1e-12)
        seen.add(found)
    # With up to four ranks an inequality, 5c, has no solution: a tree is never the least.
    assert seen == ({"allgather"} if ranks <= 2 else {"allgather", "ring"} if ranks <= 4 else set(KINDS))
