"""The rows of ``mpicomp bench collectives``: no time is asserted, only how times relate and what is run how often."""

import numpy as np
import pytest
from mpicomp.bench import collectives
from mpicomp.bench.collectives import Settings, measure, plans_of
from mpicomp.bench.measure.exchanges import Plan, StepPlan
from mpicomp.bench.measure.mean_check import Check
from mpicomp.bench.measure.timed_plan import OSU_HEADER, osu_blocks

from mpicomp import Dense, TopK
from mpicomp.collectives import variants
from mpicomp.mpi import LocalWorld

TOPK = TopK(ratio=0.1)


def silent(*_):
    pass


def run(settings, transport=None, model=None):
    return measure(settings, transport or LocalWorld(1).transports[0], model, silent, silent)


class Scripted:
    """A runner whose steps take what the test says: by the plan's name, the last number again and again."""

    seconds: dict = {}  # noqa: RUF012
    ran_in_order: list = []  # noqa: RUF012

    def __init__(self, plan, gradients, transport, residuals, model):
        self.plan, self.numel = plan, gradients.numel
        self.steps, self.checks, self.ran = [], [], []
        self.route = None

    def step(self, check=False):
        if self.numel == collectives._COMPILED_NUMEL:
            return
        times = self.seconds[self.plan.name]
        self.steps.append(np.array([[times[min(len(self.steps), len(times) - 1)], 0, 0, 0, 0, 8, 9, 0, 1]], float))
        self.ran.append(StepPlan(self.plan.name, None, 0.5))
        self.ran_in_order.append(self.plan.name)
        if check:
            self.checks.append(Check(0.0, 1.0, True))

    def catch_up(self):
        pass

    def close(self):
        pass

    def slowest(self):
        return [float(step[0, 0]) for step in self.steps]


@pytest.fixture
def scripted(monkeypatch):
    """Return a function that measures plans of scripted seconds and returns the rows by collective."""

    def start(dense, topk=None, auto=None, expected=None, limit_s=10.0, library=9.0):
        seconds = {f"dense {name}": times for name, times in dense.items()}
        seconds |= {f"topk {name}": times for name, times in (topk or {}).items()}
        seconds["topk auto"] = auto
        Scripted.seconds, Scripted.ran_in_order = seconds, []
        seconds["dense MPI_Allreduce"] = [library]
        monkeypatch.setattr(collectives, "Runner", Scripted)
        monkeypatch.setattr(
            collectives,
            "plans_of",
            lambda compressor, names, flat: [Plan(compressor, name) for name in (dense, topk)[compressor != Dense()]],
        )
        if expected is not None:
            original = collectives._Bench._expect

            def expect(self, plans, numel):
                timings = original(self, plans, numel)
                for timing in timings:
                    timing.expected_s = expected[timing.plan.collective]
                return sorted(timings, key=lambda timing: timing.expected_s)

            monkeypatch.setattr(collectives._Bench, "_expect", expect)
        compressors = [] if topk is None else [TOPK]
        rows = run(Settings([100], compressors, None, auto is not None, limit_s))
        return {row["collective"]: row for row in rows}

    return start


@pytest.mark.parametrize(
    ("seconds", "stopped", "samples", "median_s", "steps"),
    [
        ([5.0, 1e-3], "interval", 30, 1e-3, 39),  # nine steps warm up
        ([41.0, 1.0], "once", 1, 41.0, 1),  # the first step takes more than four times the limit
        ([3.0, 3.0, 2.0], "limit", 5, 2.0, 7),  # two steps warm up; the third one and four more count
        ([12.0, 12.0, 11.0], "limit", 3, 11.0, 5),  # three steps, however long they are
    ],
)
def test_plan_is_timed_as_its_seconds_allow(scripted, seconds, stopped, samples, median_s, steps):
    row = scripted({"ring": seconds})["ring"]
    found = row["stopped"], row["samples"], row["median_s"], Scripted.ran_in_order.count("dense ring")
    assert found == (stopped, samples, median_s, steps)
    assert (row["low_s"], row["high_s"]) == ((median_s, median_s) if stopped == "interval" else (None, None))
    assert row["correct"] is True


def test_unsteady_plan_is_timed_to_the_limit(scripted):
    row = scripted({"ring": [0.01] * 9 + [0.05, 0.15] * 100}, limit_s=4)["ring"]
    assert row["stopped"] == "limit"
    assert 39 <= row["samples"] <= 40
    assert (row["low_s"], row["high_s"]) == (0.05, 0.15)


def test_three_times_slower_than_the_best_is_hardly_timed(scripted):
    rows = scripted({"ring": [0.1, 0.01], "allreduce": [3.0, 2.0]})
    assert rows["ring"]["stopped"] == "interval"
    assert (rows["allreduce"]["stopped"], rows["allreduce"]["samples"], rows["allreduce"]["median_s"]) == ("once", 1, 2)
    assert rows["ring"]["speedup"] == 1
    assert rows["allreduce"]["speedup"] == pytest.approx(0.005)


def test_hopeless_plan_is_not_run(scripted):
    dense = {"ring": [0.1, 0.01], "allreduce": [0.1, 0.01], "parameter-server": [90.0]}
    expected = {"ring": 2.0, "allreduce": 1.0, "parameter-server": 21.0, "allgather": 0.9}
    rows = scripted(dense, topk={"allgather": [0.1]}, expected=expected)
    assert rows["parameter-server"]["median_s"] is None
    assert rows["parameter-server"]["predicted_s"] == 21
    assert rows["parameter-server"]["samples"] == 0
    assert list(rows) == ["allreduce", "ring", "parameter-server", "MPI_Allreduce", "allgather"]
    assert "dense parameter-server" not in Scripted.ran_in_order


def test_auto_takes_turns_with_the_best_plans(scripted):
    rows = scripted(
        {"ring": [0.1, 0.02], "allreduce": [0.1, 0.03]},
        topk={"allgather": [0.1, 0.01], "star-topk:ring": [0.1, 0.015]},
        auto=[0.3] * 60 + [0.011],
    )
    row = rows["auto"]
    assert row["median_s"] == 0.011
    assert (row["best"], row["best_s"]) == ("topk allgather", 0.01)
    assert (row["best_dense"], row["best_dense_s"]) == ("dense ring", 0.02)
    assert row["regret"] == pytest.approx(0.1)
    assert row["regret_low"] == row["regret_high"] == pytest.approx(0.1)
    assert row["behind_dense"] == pytest.approx(-0.45)
    assert row["samples"] == 30
    turns = Scripted.ran_in_order[-91:-1]  # the last one is checked
    assert turns[:3] != turns[3:6]
    assert all(set(turns[at : at + 3]) == {"topk auto", "topk allgather", "dense ring"} for at in range(0, 90, 3))
    assert Scripted.ran_in_order[-1] == "topk auto"


def test_auto_takes_turns_with_the_library(scripted):
    rows = scripted({"ring": [0.02]}, topk={"allgather": [0.01]}, auto=[0.011], library=0.03)
    assert rows["auto"]["mpi_s"] == rows["MPI_Allreduce"]["median_s"] == 0.03
    assert rows["MPI_Allreduce"]["speedup"] == pytest.approx(2 / 3)
    assert rows["MPI_Allreduce"]["compressor"] == "none"
    turns = {"topk auto", "topk allgather", "dense ring", "dense MPI_Allreduce"}
    assert set(Scripted.ran_in_order[-120:]) == turns


@pytest.mark.slow
def test_auto_is_compared_with_what_it_may_choose(scripted):
    topk = {"allgather": [0.1, 0.01], "star-topk:ring": [0.1, 0.005]}
    rows = scripted({"ring": [0.1, 0.02]}, topk=topk, auto=[0.01])
    assert rows["star-topk:ring"]["median_s"] == 0.005
    assert (rows["auto"]["best"], rows["auto"]["regret"]) == ("topk allgather", 0.0)


def test_names_that_do_not_fit_are_left_out():
    assert plans_of(TOPK, ["allreduce", "allgather"], flat=True) == [Plan(TOPK, "allgather")]
    assert [plan.collective for plan in plans_of(TOPK, None, flat=False)] == variants(TOPK)
    assert not any("hierarchical" in plan.collective for plan in plans_of(TOPK, None, flat=True))


@pytest.fixture(scope="module")
def rows():
    return run(Settings([50, 3000], [TOPK, TopK(ratio=0.01)], ["allgather", "star-topk"], True, 0.05))


def test_speed_ups_are_over_the_best_dense_plan():
    rows = run(Settings([50, 3000], [TOPK], ["allgather"], False, 0.02))
    for numel in (50, 3000):
        of_length = [row for row in rows if row["numel"] == numel]
        base = min(row["median_s"] for row in of_length if row["compressor"] == "dense")
        for row in of_length:
            assert row["speedup"] == pytest.approx(base / row["median_s"])
            assert row["correct"] is (None if row["compressor"] == "none" else True)
            assert row["ranks"] == row["hosts"] == 1
            assert row["median_s"] <= row["p95_s"] <= row["p99_s"]
            assert row["rank_min_s"] <= row["rank_mean_s"] <= row["rank_max_s"]
            assert row["algbw_gb_s"] == pytest.approx(4 * numel / row["median_s"] / 1e9)
            assert row["compress_s"] + row["exchange_s"] + row["decode_s"] < 2 * row["median_s"]


@pytest.mark.slow
def test_steady_residual_is_small(rows):
    for row in rows:
        if row["ratio"] == 0.01 and row["numel"] == 3000:
            assert row["gain"] < 0.2  # 2 % of fresh gradients' energy would be 0.1 of it and more


@pytest.mark.slow
def test_text_that_reads_like_osu(rows):
    text = osu_blocks(rows, "1 rank on 1 host")
    assert OSU_HEADER == "# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations"
    lines = text.splitlines()
    headers = [at for at, line in enumerate(lines) if line.startswith(OSU_HEADER)]
    plans = {(row["compressor"], row["ratio"], row["collective"]) for row in rows}
    assert len(headers) == len(plans)
    for at in headers:
        assert lines[at - 1].startswith(("# mpicomp ", "# MPI_Allreduce: "))
        cells = [line.split() for line in lines[at + 1 : at + 3]]
        assert [cell[0] for cell in cells] == ["200", "12000"]
        assert all(len(cell) == 15 for cell in cells)
        for cell in cells:
            mean, low, high = map(float, cell[1:4])
            assert low <= mean <= high
            assert int(cell[4]) >= 1


@pytest.mark.mpi(min_size=2, max_size=3)
def test_ranks_agree_on_everything_and_means_are_right(comm, caplog):
    from mpicomp.cost import calibrate
    from mpicomp.mpi.comm import MPITransport

    transport = MPITransport(comm)
    model = calibrate(transport)
    found = run(Settings([5000], [TOPK], ["allgather", "star-topk:ring"], True, 0.02), transport, model)
    transport.close()
    assert not caplog.records, "there is no training that could fall behind"
    assert comm.allgather(found) == [found] * comm.size
    assert all(row["correct"] and row["predicted_s"] > 0 for row in found if row["compressor"] != "none")
    assert all(row["sent_bytes"] > 0 for row in found)
    names = [f"{row['compressor']} {row['collective']}" for row in found]
    assert found[-1]["best"] in names
    assert found[-1]["chosen"] in names or found[-1]["chosen"].removeprefix("topk ") in variants(TOPK)
