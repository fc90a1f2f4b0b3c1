"""mpicomp plan: exchanges on a network that is not here, from a run, a script's first steps, or two numbers."""

import json
import subprocess
import sys

import numpy as np
import pytest
from mpicomp.bench.plan import Links, gpt_job, plan, read_job

from mpicomp import cli, forecast
from mpicomp.cost import CostModel, Network
from mpicomp.cost.kernel_costs import KernelCost
from mpicomp.errors import ConfigurationError
from mpicomp.forecast import Forecaster, Job, advice, recommended

MODEL = ["--parameters", "3e6", "--step-seconds", "0.2"]
FREE = {name: KernelCost(0.0, 0.0) for name in ("ddp", "ddp-fp16")}


def rows(job, gbits=1.0, hosts=4, ppn=1, latency_s=0.0, overlap=True):
    links = Links(hosts, ppn, 1e9 * gbits, latency_s)
    return {row.exchange: row for row in Forecaster(job, links.network, links.group, overlap).all()}


def job(**changed):
    """Four layers of 2 MB, and an embedding of 4 MB that is ready last."""
    words = {"sizes": [500_000] * 4 + [1_000_000], "ready_s": [-0.4, -0.3, -0.2, -0.1, 0.0], "compute_s": 1.0}
    return Job(**words | {"muon_s": 0.0, "hidden": 0.67, "kernels": FREE} | changed)


@pytest.mark.parametrize("gbits", [0.05, 0.2, 1.0, 40.0])
@pytest.mark.parametrize(("exchange", "itemsize"), [("ddp", 4), ("ddp-fp16", 2)])
def test_ddp_takes_what_its_buckets_take_one_after_the_other(gbits, exchange, itemsize):
    """DDP's first bucket is full at a megabyte, and the others at 25: here the first layer, and the rest.

    Of backward 0.4 hides rounds.
    """
    per_byte = 2 * 3 / 4 * 8 / (0.95 * 1e9 * gbits)
    now = 0.4 * -0.4 + 500_000 * itemsize * per_byte
    now = max(now, 0.0) + 2_500_000 * itemsize * per_byte
    assert rows(job(), gbits)[exchange].step_s == pytest.approx(1.0 + now, rel=1e-6)
    inline_s = 1.0 + 3_000_000 * itemsize * per_byte
    assert rows(job(), gbits, overlap=False)[exchange].step_s == pytest.approx(inline_s, rel=1e-6)


def test_kernels_delay_backward_and_rounds_do_not():
    slow = {"ddp": KernelCost(0.0, 1e-7)}
    assert rows(job(kernels=slow), 1e3)["ddp"].step_s == pytest.approx(1.3, abs=1e-3)


def test_latencies_of_ddp_are_those_of_a_ring_and_of_a_tree_among_many():
    found = [rows(job(), 1e3, hosts, latency_s=1e-3)["ddp"].step_s for hosts in (4, 4096)]
    assert found[0] == pytest.approx(1.0 + 6e-3, abs=1e-3)
    assert found[1] == pytest.approx(1.0 + 48e-3, abs=2e-3)


def test_steps_wait_for_the_slowest_of_ranks_whose_seconds_differ():
    seconds = [0.9, 1.0, 1.0, 1.4]
    slowest_s = np.random.default_rng(0).choice(seconds, (100_000, 4)).max(axis=1).mean()
    found = rows(job(spread_s=seconds), 1e3)
    assert found["ddp"].step_s == pytest.approx(slowest_s, rel=5e-3)
    assert found["none"].step_s == 1.0
    shared = rows(job(spread_s=seconds, core_share=0.5), 1e3)  # ranks that wait leave their core to the slowest
    assert shared["ddp"].step_s == pytest.approx((1.0 + slowest_s) / 2, rel=5e-3)
    assert 1.0 < found["muon every 40"].step_s < found["muon every 2"].step_s < found["ddp"].step_s


def test_bytes_of_a_host_are_those_of_each_exchange():
    found, numel = rows(job()), 3_000_000
    assert found["ddp"].host_bytes == 1.5 * 4 * numel
    assert found["topk 1 %"].host_bytes == pytest.approx(3 * 0.01 * numel * 5.1, rel=0.02)
    bits = 1.5 * numel * (1 / 8 + 4 / 1024)
    for every in forecast.MUON_EVERY:
        assert found[f"muon every {every}"].host_bytes == pytest.approx(bits / every, rel=0.02)
    assert rows(job(), ppn=4)["ddp"].host_bytes == found["ddp"].host_bytes  # ranks of a host share its link


def test_muon_takes_its_step_and_a_part_of_an_exchange():
    found = rows(job(muon_s=0.1, kernels=FREE | {}), gbits=0.01)
    steps = [(found[f"muon every {every}"].step_s - 1.1) * every for every in forecast.MUON_EVERY]
    assert steps == pytest.approx([steps[0]] * 3)
    assert found["muon every 2"].steps_ratio < found["muon every 10"].steps_ratio < found["muon every 40"].steps_ratio
    assert rows(job(hidden=0.3))["muon every 10"].steps_ratio is None  # not measured on such models


def test_auto_sends_few_bits_on_slow_links_and_dense_on_fast_ones():
    assert rows(job(), 0.02)["auto"].plan.startswith("qsgd 4 bits")
    assert rows(job(), 1e3)["auto"].plan.startswith("dense")


def test_dense_is_recommended_unless_something_is_clearly_faster_in_its_step():
    """LocalMuon needs fewer steps on any network, for which no slow link is to blame."""
    fast, slow = (list(rows(job(muon_s=0.2), gbits).values()) for gbits in (400, 0.1))
    assert recommended(fast).exchange.startswith("ddp")
    best = recommended(slow)
    assert best.exchange == min((row for row in slow if row.quality_s), key=lambda row: row.quality_s).exchange
    assert plan(job(muon_s=0.2), Links(4, 1, 400e9, 0.0), True)["reason"].startswith("dense exchange is best here")


def test_penalties_are_those_of_the_policy():
    from mpicomp.policies.convergence_penalty import ElementStatistics, ElementSurvey
    from mpicomp.policies.ratio_levels import suggested_compressors

    quantisers = suggested_compressors(None)[1]
    survey, statistics = ElementSurvey([4096], quantisers), ElementStatistics(4096, len(quantisers))
    random = np.random.default_rng(0)
    scales = random.lognormal(sigma=2.0, size=4096).astype(np.float32)
    for step in range(12):
        gradient = scales * (1 + random.standard_normal(4096).astype(np.float32))
        statistics.observe(survey.measure(gradient, None, [4096], step)[None])
    made = Job.from_json(
        json.loads(json.dumps(job(sizes=[4096], ready_s=[0.0], statistics=[statistics] * 2).to_json()))
    )
    links = Links(4, 1, 1e9, 0.0)
    forecaster = Forecaster(made, links.network, links.group)
    for index, quantiser in enumerate(quantisers):
        assert forecaster.penalty(quantiser) == pytest.approx(statistics.quantiser_penalty(index, 4, 500))
    [row] = [row for row in forecaster.all() if row.exchange == "topk 1 %"]
    behind = statistics.selection_penalties(np.array([0.01]), 4, 500)[0][0]
    assert row.steps_ratio == pytest.approx(1 / (1 - min(behind, 0.9)))
    assert row.steps_low <= row.steps_ratio <= row.steps_high


@pytest.mark.parametrize("parameters", [1, 1000, 3_000_000, 124_000_000, 7_000_000_000])
def test_gpt_has_as_many_parameters_as_asked_for(parameters):
    made = gpt_job(parameters, 0.5)
    assert sum(made.sizes) == parameters
    assert list(made.ready_s) == sorted(made.ready_s)
    assert made.ready_s[-1] == 0
    assert min(made.sizes) >= 0
    assert parameters < 1e6 or 0.5 < made.hidden < 1


def test_many_ranks_are_forecast_and_what_grows_is_named():
    found = plan(gpt_job(124_000_000, 0.3), Links(16_384, 1, 1e11, 50e-6), False)
    assert "these grow with the ranks: bytes of allgather" in found["notes"][-1]
    assert any("computed only" in note for note in found["notes"])
    few, many = (rows(gpt_job(124_000_000, 0.3), 100, hosts)["topk 1 %"].step_s for hosts in (8, 16_384))
    assert many > 10 * few


def test_faster_links_never_slow_down():
    found = plan(gpt_job(124_000_000, 0.3), Links(8, 1, 1e8, 50e-6), False)
    assert [faster["bits"] for faster in found["faster"]] == [2e8, 5e8]
    assert 1 <= found["faster"][0]["speedup"] <= found["faster"][1]["speedup"]


def test_advice_names_muon_where_links_are_slow():
    slow, fast = (Links(4, 1, 1e9 * gbits, 0.0) for gbits in (0.1, 100))
    assert "LocalMuon" in advice(job(), slow.network, slow.group, step_s=3.0)
    assert advice(job(), fast.network, fast.group, step_s=1.01) is None


def test_command_prints_and_writes_each_network(tmp_path, capsys):
    path, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    words = ["plan", *MODEL, "--hosts", "2,8", "--bandwidth", "100mbit,10gbit", "--json", str(path)]
    assert cli.main([*words, "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "8 hosts, 10 Gbit/s, 50 us; 3,000,000 parameters" in text
    written = json.loads(path.read_text())
    assert [(found["hosts"], found["bits"]) for found in written["networks"]] == [
        (2, 1e8), (8, 1e8), (2, 1e10), (8, 1e10)
    ]  # fmt: skip
    assert Job.from_json(written["job"]).numel == 3_000_000
    assert picture.read_text().startswith("<?xml")


def test_command_loads_neither_mpi_nor_torch():
    code = (
        "import sys; from mpicomp import cli\n"
        f"assert cli.main(['plan', *{MODEL}, '--hosts', '4']) == 0\n"
        "assert not {'mpi4py.MPI', 'torch', 'cupy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_links_are_those_that_were_measured(tmp_path, capsys):
    network = Network(2)
    network.set_link("world", 1e-3, 8e-8, 0.1)
    path = tmp_path / "links.json"
    CostModel(network).save(str(path))
    assert cli.main(["plan", *MODEL, "--hosts", "4", "--links", str(path)]) == 0
    assert "4 hosts, 100 Mbit/s, 1e+03 us" in capsys.readouterr().out
    CostModel(Network(1)).save(str(path))
    assert cli.main(["plan", *MODEL, "--links", str(path)]) == 2


def test_run_of_train_has_parameters_and_seconds(tmp_path):
    path = tmp_path / "run.json"
    phases = {"compute": 0.08, "update": 0.02, "other": 0.01, "exchange": 7.0}
    path.write_text(json.dumps({"parameters": 100_000, "phases_s": phases, "steps": 300}))
    made, is_measured = read_job(str(path), None)
    assert (made.numel, made.steps, is_measured) == (100_000, 300, False)
    assert made.compute_s == pytest.approx(0.11)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"parameters": 5}',
        '{"parameters": 5, "phases_s": {}}',
        '{"schema": 99, "sizes": [1]}',
        "compute",
    ],
)
def test_files_without_timings_are_refused(content, tmp_path):
    path = tmp_path / "run.json"
    if content == "compute":
        content = json.dumps(job().to_json() | {"compute_s": 0.0})
    path.write_text(content)
    with pytest.raises(ConfigurationError, match="has no timings that this mpicomp can read"):
        read_job(str(path), None)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([*MODEL, "--bandwidth=-1gbit"], "--bandwidth must be a number"),
        ([*MODEL, "--hosts", "1"], "--hosts must be"),
        ([*MODEL, "--hosts", "1000000000"], "at most 65,536 ranks"),
        ([*MODEL, "--hosts", "many"], "--hosts must be whole numbers"),
        (["--parameters", "5"], "--step-seconds"),
        (["--parameters", "5", "--step-seconds", "-1"], "above 0"),
        ([*MODEL, "--task", "digits"], "name one of"),
        (["--from", "missing.json"], "cannot be read"),
        (["--task", "nothing"], "unknown name 'nothing'"),
    ],
)
def test_bad_input_is_one_error(words, text, capsys):
    assert cli.main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_simulate_says_what_to_type(capsys):
    assert cli.main(["simulate", "--hosts", "4"]) == 2
    assert "'simulate' is now: mpicomp plan --hosts N" in capsys.readouterr().err
