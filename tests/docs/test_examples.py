"""The examples of the documentation run; those that are plugins are in tests/plugins."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def _among_the_examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    for path in EXAMPLES.glob("*.py"):  # what an earlier test has registered may be forgotten by now
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


def test_a_compressor_in_one_file(capsys):
    runpy.run_path(str(EXAMPLES / "use_sign_topk.py"))
    assert capsys.readouterr().out.startswith("[ 1.5 -1.5  3.  -3. ] [ 1.5 -1.5  3.  -3. ]")


@pytest.mark.mpi(max_size=3)
def test_loop_without_a_framework_trains(comm):
    module = runpy.run_path(str(EXAMPLES / "plain_loop.py"))
    assert module["main"](comm.rank, comm.size, comm=comm) > 0.95


@pytest.mark.mpi(max_size=3)
def test_script_with_three_lines_trains(comm):
    torch = pytest.importorskip("torch")
    torch.manual_seed(comm.rank)
    model = runpy.run_path(str(EXAMPLES / "distributed_torch.py"))["main"]()
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
    everyones = np.empty((comm.size, mine.size), np.float32)
    comm.Allgather(mine, everyones)
    assert (everyones == everyones[0]).all()


@pytest.mark.mpi(max_size=3)
def test_script_with_epochs_resumes(comm, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    main = runpy.run_path(str(EXAMPLES / "epochs_torch.py"))["main"]
    _, error = main(tmp_path, epochs=2)
    model, later = main(tmp_path, epochs=6)
    assert later < 0.7 * error
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"epoch {epoch}" for epoch in range(6) if comm.rank == 0]
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert all(torch.equal(mine, other) for other in comm.allgather(mine))
    assert (tmp_path / "model.pt").exists() == (comm.rank == 0)


@pytest.mark.mpi(min_size=4, max_size=4)
def test_script_of_a_sharded_model_trains(comm):
    torch = pytest.importorskip("torch")
    try:
        model, loss = runpy.run_path(str(EXAMPLES / "hsdp.py"))["main"](steps=20, shards=2)
        replicas = comm.Split(comm.rank % 2, comm.rank)
        mine = torch.cat([parameter.to_local().detach().flatten() for parameter in model.parameters()])
        assert all(torch.equal(mine, other) for other in replicas.allgather(mine))
        assert sum(comm.allgather(loss)) / 4 < 3.2  # of 4.2
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.mpi(min_size=3, max_size=3)
def test_power_gossip_reaches_consensus_and_learns(comm):
    module = runpy.run_path(str(EXAMPLES / "power_gossip.py"))

    def spread(model):
        models = np.array(comm.allgather(np.concatenate([array.ravel() for array in model.values()])))
        return np.linalg.norm(models - models.mean(axis=0)) / np.linalg.norm(models.mean(axis=0))

    model, losses, sent = module["main"](comm)
    numel = sum(array.size for array in model.values())
    assert losses[-1] < 0.15 * losses[0]  # on data that two of three ranks never see
    assert spread(model) < 0.03
    assert sent < 0.25 * numel * len(losses)
    alone, losses, _ = module["main"](comm, gossips=False)
    assert losses[-1] > 0.6 * losses[0]
    assert spread(alone) > 0.2
    # Without gradients models meet at their mean.
    mean = sum(comm.allgather(alone["w1"])) / comm.size
    gossip = module["PowerGossip"](comm)
    for _ in range(200):
        gossip.average(alone)
    np.testing.assert_allclose(alone["w1"], mean, atol=1e-6)


@pytest.mark.mpi(min_size=3, max_size=3)
def test_sketched_amsgrad_is_as_good_as_amsgrad(comm):
    module = runpy.run_path(str(EXAMPLES / "sketched_amsgrad.py"))
    numel, k = module["NUMEL"], 40
    sketched, dense = module["SketchedAMSGrad"](comm, numel, k, lr=0.1), module["AMSGrad"](comm, numel, lr=0.1)
    weights, errors = module["main"](comm, sketched)
    assert all(np.array_equal(weights, other) for other in comm.allgather(weights))
    _, expected = module["main"](comm, dense)
    assert errors[0] - errors[-1] > 0.95 * (errors[0] - expected[-1])
    assert sketched.sent <= (k * np.log(numel) + k) * len(errors) < 0.2 * dense.sent


def test_example_counts_steps_behind(tmp_path, capsys, monkeypatch):
    rng = np.random.default_rng(0)
    steps = np.arange(300)
    batches = 0.02 * rng.standard_normal(300)  # that both trainings have
    for name, behind in [("dense", 0), ("late", 30)]:
        losses = np.exp(-0.004 * (steps - behind * np.minimum(steps / 100, 1)) + batches)
        lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses.tolist())]
        (tmp_path / name).write_text("\n".join(lines))
    monkeypatch.setattr("sys.argv", ["behind.py", str(tmp_path / "dense"), str(tmp_path / "late"), "250", "290"])
    runpy.run_path(str(EXAMPLES / "behind.py"), run_name="__main__")
    assert abs(int(capsys.readouterr().out) - 30) <= 1
