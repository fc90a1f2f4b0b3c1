"""Commands on several ranks, one of which fails: nobody waits for it, and its traceback is the last word."""

import numpy as np
import pytest
from marks import slow

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from mpicomp.cost import CostModel, Network

SCRIPT = """
import importlib, sys
from mpicomp.job import launcher
from mpicomp.cli import main

place, call, words = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
if launcher.detect().rank == launcher.detect().size - 1:
    name, _, attribute = place.partition(":")
    owner = importlib.import_module(name)
    *path, last = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, calls = getattr(owner, last), []

    def fail(*arguments, **settings):
        calls.append(None)
        if len(calls) == call:
            raise RuntimeError("only this rank fails")
        return original(*arguments, **settings)

    setattr(owner, last, fail)
sys.exit(main(words))
"""

COLLECTIVES = ["bench", "collectives", "--numel", "1000", "--collective", "allgather,auto", "--limit", "0.2"]
TRAIN = ["train", "--task", "digits", "--compressor", "topk", "--steps", "12"]
TRAINING = ["bench", "training", "--task", "digits", "--steps", "4", "--blocks", "2", "--warm-up", "2"]


@pytest.mark.parametrize("ranks", [2, slow(3)])
@pytest.mark.parametrize(
    ("place", "call", "words"),
    [
        slow("mpicomp.bench.measure.exchanges:Runner.step", 5, COLLECTIVES),
        slow("mpicomp.cost.link_probe:_task", 3, ["doctor"]),
        ("mpicomp.job.doctor.examination:by_host", 1, ["doctor"]),
        slow("mpicomp.bench.tasks.digits:Digits.loss", 5, TRAIN),
        slow("mpicomp.bench.train:probe", 1, TRAIN),
        slow("mpicomp.bench.tasks.digits:Digits.loss", 9, [*TRAINING, "--exchange", "ddp,topk"]),
    ],
)
def test_failed_rank_ends_the_job_with_its_traceback(mpiexec, ranks, place, call, words):
    done = mpiexec(ranks, "-c", SCRIPT, place, call, *words, timeout=120)
    assert done.returncode != 0
    assert "RuntimeError: only this rank fails" in done.stderr
    assert f"rank {ranks - 1} of {ranks}: uncaught exception, ending the job" in done.stderr


WORDS_OF_RANKS = """
import sys
from mpicomp.job import launcher
from mpicomp.cli import main

sys.exit(main([word.replace("RANK", str(launcher.detect().rank)) for word in sys.argv[1:]]))
"""


@pytest.mark.parametrize("ranks", [2, slow(3)])
def test_file_that_some_ranks_lack_ends_the_job(mpiexec, tmp_path, ranks):
    np.savez(tmp_path / "data-0.npz", x=np.zeros((50, 8, 8)), y=np.arange(50) % 2)
    words = ["train", "--task", "digits", "--steps", "2", "--data", f"{tmp_path}/data-RANK.npz"]
    done = mpiexec(ranks, "-c", WORDS_OF_RANKS, *words, timeout=120)
    assert done.returncode == 2
    assert f"rank 1 of {ranks}: " in done.stderr
    assert "data-1.npz" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("ranks", [2, slow(3)])
@pytest.mark.parametrize("place", [slow(0), 1])
def test_cost_model_of_rank_0_counts(mpiexec, tmp_path, ranks, place):
    CostModel(Network(1)).save(str(tmp_path / f"cost-{place}"))
    done = mpiexec(ranks, "-c", WORDS_OF_RANKS, *COLLECTIVES, "--from", tmp_path / "cost-RANK", timeout=120)
    assert done.returncode == (0 if place == 0 else 2)
    assert ("cost-0' cannot be read" in done.stderr) == (place == 1)
    assert done.stderr.count("cannot be read") == place
