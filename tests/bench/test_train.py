"""``mpicomp train`` as a user starts it."""

import json
from pathlib import Path

import numpy as np
import pytest
from marks import slow
from mpicomp.bench.measure.metrics import MetricsWriter
from mpicomp.bench.measure.progress import Progress
from mpicomp.bench.measure.run_fields import RunObject
from mpicomp.bench.tasks import get_task

from mpicomp import Dense
from mpicomp.cli import main
from mpicomp.mpi import LocalWorld
from mpicomp.policies import get_policy

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from mpicomp.bench.train import Settings, train_measured  # noqa: E402, it loads torch

from mpicomp.torch import LocalMuon  # noqa: E402


def train(mpiexec, tmp_path, ranks, *arguments, timeout=90):
    out, metrics = tmp_path / "out.json", tmp_path / "metrics.jsonl"
    done = mpiexec(ranks, "-m", "mpicomp", "train", *arguments, "--json", out, "--metrics", metrics, timeout=timeout)
    if done.returncode:
        return done, None, None
    return done, *read(out, metrics)


def read(out, metrics):
    return json.loads(out.read_text()), [json.loads(line) for line in metrics.read_text().splitlines()]


def train_here(comm, tmp_path, capsys, *arguments):
    """Train digits in these very ranks, whose start takes longer than a few steps; return what rank 0 prints, too."""
    folder = Path(comm.bcast(str(tmp_path)))
    files = folder / "out.json", folder / "metrics.jsonl"
    options = ["--json", str(files[0]), "--metrics", str(files[1])]
    assert main(["train", "--task", "digits", *arguments, *options]) == 0
    comm.Barrier()
    return comm.bcast(capsys.readouterr().out), *read(*files)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "arguments", "collective", "numel_sent"),
    [
        slow(1, ["--compressor", "topk", "--ratio", "0.05"], "allgather", 0),
        (3, ["--compressor", "topk", "--ratio", "0.05", "--collective", "allgather"], "allgather", None),
        slow(2, [], "auto", None),
    ],
)
def test_train_writes_what_its_lines_add_up_to(mpiexec, tmp_path, ranks, arguments, collective, numel_sent):
    done, result, lines = train(
        mpiexec, tmp_path, ranks, "--task", "digits", "--steps", "60", "--seed", "3", *arguments
    )
    assert done.returncode == 0, done.stderr
    assert set(result) == set(RunObject.__struct_fields__)
    ran_as = [result[name] for name in ("task", "ranks", "hosts", "steps", "seed")]
    assert ran_as == ["digits", ranks, 1, 60, 3]
    if collective == "auto":
        assert result["collective"] in {bucket["collective"] for line in lines[20:] for bucket in line["buckets"]}
        assert all(bucket["reason"].startswith("auto: ") for line in lines[20:] for bucket in line["buckets"])
        assert all(bucket["predicted_s"] > 0 for line in lines for bucket in line["buckets"])
    else:
        assert result["collective"] == collective
    assert result["policy"] == result["policy_config"]["id"] == ("static" if arguments else "auto")
    assert result["quality"]["name"] == "held-out accuracy"
    assert result["quality"]["better"] == "higher"
    assert result["quality"]["value"] > 0.7  # ten classes
    assert result["dense_bytes"] == 4 * result["parameters"] * 60
    assert result["dense_wire_bytes"] == pytest.approx(2 * (ranks - 1) / ranks * result["dense_bytes"])
    assert result["median_step_s"] > 0
    if ranks > 1 and "topk" in arguments and collective != "auto":  # which may have found that dense is faster
        assert result["wire_bytes"] < result["dense_wire_bytes"] / 3
    if numel_sent == 0:
        assert result["sent_bytes"] == result["wire_bytes"] == 0
    assert f"verdict: {result['verdict']}" in done.stdout
    assert "LocalMuon" not in done.stdout
    reported = [(bucket["gain"], bucket["energy"]) for line in lines[30:] for bucket in line["buckets"]]
    sent = sum(gain * energy for gain, energy in reported)
    assert result["delay"] == pytest.approx(sum(energy for _, energy in reported) / sent - 1, rel=1e-6, abs=1e-9)
    assert [line["step"] for line in lines] == list(range(60))
    assert all(line["schema"] == 1 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    if collective != "auto":  # lines are rank 0's, and in some collectives it sends more than others
        wire = sum(line["wire_bytes"] for line in lines)
        assert wire == pytest.approx(result["wire_bytes"], rel=0.02)
    assert all(line["quality"] is None for line in lines)
    check_choices(result, lines)
    assert set(lines[0]["phases_s"]) == {"compute", "compress", "exchange", "decode", "update", "other"}


def check_choices(result, lines):
    """Compare what is said of plans and layers with the lines."""
    kept = [sum(bucket["ratio_reached"] * bucket["numel"] for bucket in line["buckets"]) for line in lines]
    ratios = sorted(np.array(kept) / result["parameters"])
    assert result["ratios"]["least"] == pytest.approx(ratios[0])
    assert result["ratios"]["most"] == pytest.approx(ratios[-1])
    assert result["ratios"]["median"] == pytest.approx(np.median(ratios))
    for plan in result["plans"]:
        same = [
            bucket["numel"]
            for line in lines
            for bucket in line["buckets"]
            if (bucket["compressor"], bucket["collective"]) == (plan["compressor_config"], plan["collective"])
        ]
        assert plan["share"] == pytest.approx(sum(same) / result["parameters"] / len(lines))
        assert plan["compressor"] == plan["compressor_config"]["id"]
        assert plan["ratio"] == plan["compressor_config"].get("ratio", 1.0)
    assert sum(plan["share"] for plan in result["plans"]) == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [slow('{"id": "auto", "fidelity": 0.5}'), "auto", slow("static")])
def test_policy_with_a_compressor_runs_it_or_dense(mpiexec, tmp_path, policy):
    arguments = ["--task", "digits", "--steps", "40", "--compressor", "topk", "--policy", policy]
    done, result, lines = train(mpiexec, tmp_path, 2, *arguments)
    assert done.returncode == 0, done.stderr
    ran = {bucket["compressor"]["id"] for line in lines for bucket in line["buckets"]}
    assert ran <= {"topk", "dense"}
    assert {bucket["compressor"].get("wire") for line in lines for bucket in line["buckets"]} == {None}
    if policy == "static":
        assert result["compressor"] == "topk"
    else:
        half = [bucket for line in lines[20:] for bucket in line["buckets"]]
        kinds = [bucket["compressor"]["id"] for bucket in half]
        assert result["compressor"] == max(set(kinds), key=kinds.count)
        assert result["collective"] in {bucket["collective"] for bucket in half}
    if "auto" in policy:
        assert lines[0]["buckets"][0]["compressor"]["id"] == "dense"  # careful at first
    if "fidelity" in policy:
        assert result["policy_config"] == {"id": "auto", "fidelity": 0.5}
    check_choices(result, lines)


@pytest.mark.slow
def test_evaluate_every_leaves_losses_as_they_are(mpiexec, tmp_path):
    arguments = ["--task", "digits", "--steps", "20", "--compressor", "topk", "--collective", "allgather"]
    done, result, lines = train(mpiexec, tmp_path, 2, *arguments, "--evaluate-every", "5")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in lines if line["quality"] is not None] == [4, 9, 14, 19]
    assert lines[19]["quality"] == result["quality"]["value"]  # of digits all are looked at every time
    assert f"held-out {lines[19]['quality']:.3f}" in done.stdout
    _, _, without = train(mpiexec, tmp_path, 2, *arguments)
    assert [line["loss"] for line in without] == [line["loss"] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "warmup", "dense", "ratios"),
    [
        (["--compressor", "topk"], 4, 4, {0.01}),  # half of the run
        slow(["--compressor", "topk", "--collective", "allgather"], 0, 0, {0.01}),
        slow(["--compressor", "topk", "--collective", "allgather", "--warmup", "6"], 6, 6, {0.01}),
        slow(["--compressor", "topk", "--policy", "accordion", "--warmup", "2"], 2, 2, {0.01, 0.1}),
        (["--compressor", "topk", "--warmup", "ramp:4"], "ramp:4", 0, {0.25, 0.1118, 0.05, 0.02236, 0.01}),
    ],
    ids=str,
)
def test_warmup_runs_dense_steps_first(mpiexec, tmp_path, arguments, warmup, dense, ratios):
    done, result, lines = train(mpiexec, tmp_path, 1, "--task", "digits", "--steps", "8", *arguments)
    assert done.returncode == 0, done.stderr
    assert result["warmup"] == warmup
    reasons = [line["buckets"][0]["reason"] for line in lines]
    assert sum(reason.startswith("warm-up") for reason in reasons) == (4 if warmup == "ramp:4" else warmup)
    reported = [line["buckets"][0]["ratio"] for line in lines if line["buckets"][0]["compressor"]["id"] == "topk"]
    assert len(reported) == 8 - dense
    assert result["collective"] == "allgather"
    assert {float(f"{ratio:.4g}") for ratio in reported} <= ratios
    assert f"warmup {warmup}" in done.stdout if warmup else "warmup" not in done.stdout


def test_muon_steps_at_the_scaled_rate(one_thread):
    task = get_task("digits", 0)
    updates = {"sync_every": 1, "inner": "muon"}
    settings = Settings(Dense(), "auto", get_policy("static"), 5, 0, probes=False, updates=updates, lr_scale=0.5)
    with MetricsWriter(None) as metrics:
        trained = train_measured(task, settings, LocalWorld(1).transports[0], Progress(False), metrics)
    model = task.model()
    before = task.evaluate(model)
    optimizer = LocalMuon(model, 0.01, adamw_lr=1.5e-3, comm=LocalWorld(1).transports[0])
    for step in range(5):
        optimizer.zero_grad()
        task.loss(model, task.batch(step, 0, 1)).backward()
        optimizer.step()
    quality = trained.run.quality["value"]
    assert quality == pytest.approx(task.evaluate(model), abs=0.002)
    assert quality > before + 0.05


@pytest.mark.mpi(min_size=2, max_size=2)
def test_muon_is_local_muon(comm, tmp_path, capsys):
    words = ["--steps", "20", "--exchange", "muon", "--collective", "two-phase", "--no-verdict"]
    _, result, lines = train_here(comm, tmp_path, capsys, *words)
    assert (result["exchange"], result["updates"]) == ("updates", {"sync_every": 10, "inner": "muon"})
    assert (result["warmup"], result["compressor"]) == (0, "onebit")
    assert [line["step"] for line in lines if line["buckets"]] == [9, 19]
    least = 240 if comm.size < 3 else 210
    assert 320 > result["dense_wire_bytes"] / result["wire_bytes"] > least  # magnitudes, headers and surveys count


@pytest.mark.mpi(min_size=2, max_size=2)
@pytest.mark.parametrize(
    ("arguments", "updates", "exchanges"),
    [
        (["--exchange", "updates", "--every", "3"], {"sync_every": 3}, [2, 5]),
        slow(
            ["--exchange", '{"id": "updates", "outer": {"lr": 0.5}, "sync_every": 4}'],
            {"sync_every": 4, "outer": {"lr": 0.5}},
            [3, 7],
        ),
    ],
    ids=str,
)
def test_updates_are_exchanged_at_their_interval(comm, tmp_path, capsys, arguments, updates, exchanges):
    words = ["--steps", "8", "--compressor", "topk", "--collective", "allgather", *arguments]
    shown, result, lines = train_here(comm, tmp_path, capsys, *words)
    assert (result["exchange"], result["updates"]) == ("updates", updates)
    assert [line["step"] for line in lines] == list(range(8))
    seen = [line["step"] for line in lines if line["buckets"]]
    assert seen == exchanges
    numel = result["parameters"]
    ends_later = 8 % updates["sync_every"] > 0
    assert (result["wire_bytes"] > sum(line["wire_bytes"] for line in lines)) == ends_later
    dense = 8 * 4 * numel * 2 * (comm.size - 1) / comm.size
    assert result["dense_wire_bytes"] == pytest.approx(dense, rel=0.01)  # of gradients, in every step
    assert result["compressor"] == "topk"
    every = updates["sync_every"]
    assert f"updates every {every} steps" in shown if every > 1 else ", updates" in shown
    assert sum(result["phases_s"].values()) == pytest.approx(result["median_step_s"], rel=0.5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--compressor", "topkk"], "unknown name 'topkk'; did you mean 'topk'"),
        (["--compressor", '{"ratio": 0.1}'], "names its compressor under 'id'"),
        (["--compressor", "topk", "--ratio", "0"], "ratio is the kept fraction"),
        (["--compressor", "topk", "--collective", "allreduce"], "use allgather, star-topk"),
        (["--collective", "alreduce"], "unknown name 'alreduce'; did you mean 'allreduce'"),
        (["--policy", "statc"], "unknown name 'statc'; did you mean 'static'"),
        (["--policy", '{"fidelity": 0.9}'], "names its policy under 'id'"),
        (["--policy", '{"id": "auto", "fidel": 1}'], "name 'fidel'; did you mean 'fidelity'"),
        (["--policy", "auto", "--compressor", "onebit"], "which onebit cannot give"),
        (["--evaluate-every", "-1"], "--evaluate-every must be an integer of at least 0, got -1"),
        (["--shard", "2", "--checkpoints", "c"], "--checkpoints needs the whole model on each rank"),
        (["--steps", "0"], "--steps must be an integer of at least 1, got 0"),
        (["--compressor", "topk", "--warmup", "-3"], "warmup: must be a number of dense steps"),
        (["--lr-scale", "0"], "train: --lr-scale must be a number above 0, got 0.0"),
        (["--every", "2"], "--every has no effect; name --exchange updates"),
        (["--exchange", "update"], "unknown name 'update'; did you mean 'updates'"),
        (["--exchange", "updates", "--every", "0"], "--every must be an integer of at least 1"),
        (["--exchange", "updates", "--every", "often"], "a number of steps or 'auto', got 'often'"),
        (["--exchange", '{"id": "updates", "outr": 1}'], "updates have no setting 'outr'"),
        (
            ["--exchange", '{"id": "updates", "inner": "muom"}'],
            "--exchange: inner: unknown name 'muom'; did you mean 'muon'",
        ),
        (["--json", "/nonexistent/o.json"], "'/nonexistent/o.json' cannot be written"),
    ],
)
def test_bad_options_are_refused_before_mpi_starts(arguments, text, capsys):
    assert main(["train", "--task", "digits", *arguments]) == 2
    shown = capsys.readouterr()
    assert text in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--task", "digit"], "task: unknown name 'digit'; did you mean 'digits'"),
        slow(["--shard", "2"], "two replicas of 2 ranks, and this job has 2 ranks; start it with mpiexec -n 4"),
        slow(["--compressor", "topk", "--warmup", "2"], "takes all 2 steps; give it fewer"),
        slow(["--data", "/nonexistent.npz"], "/nonexistent.npz"),
    ],
)
def test_bad_options_of_several_ranks_are_printed_once(mpiexec, tmp_path, arguments, text):
    done, _, _ = train(mpiexec, tmp_path, 2, "--task", "digits", "--steps", "2", *arguments)
    assert done.returncode == 2
    assert done.stderr.count(text) == 1
    assert "Traceback" not in done.stderr
