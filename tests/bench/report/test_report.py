"""The report: reading of files, the verdict, and the page."""

import json
import math
import re
import resource
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from recordings import PHASES, write_lines, write_outcome

pytest.importorskip("matplotlib")
pytest.importorskip("msgspec")

from mpicomp.bench.report.comparison import verdict
from mpicomp.bench.report.plots import points
from mpicomp.bench.report.runs import read_lines, read_runs

import mpicomp
from mpicomp import cli
from mpicomp.errors import ConfigurationError
from mpicomp.mpi import LocalWorld


def report(folder, *names):
    """Write a report of files of a folder and return its text."""
    page = folder / "F.html"
    assert cli.main(["report", *(str(folder / name) for name in names), "-o", str(page)]) == 0
    return page.read_text()


def test_read_lines_gives_numbers_over_steps_and_the_shares_of_plans(tmp_path):
    def change(step, line):
        bucket = line["buckets"][0]
        if step >= 15:
            bucket["compressor"], bucket["collective"] = {"id": "dense"}, "allreduce"

    write_lines(tmp_path / "m.jsonl", 20, buckets=2, change=change)
    [run] = read_runs([str(tmp_path / "m.jsonl")])
    lines = [json.loads(text) for text in (tmp_path / "m.jsonl").read_text().splitlines()]
    for name in ("step", "seconds", "loss", "wire_bytes", "dense_wire_bytes"):
        assert run.column(name).tolist() == [line[name] for line in lines]
    assert np.flatnonzero(np.isfinite(run.column("quality"))).tolist() == [9, 19]
    assert run.phases_s == {name: np.median([line["phases_s"][name] for line in lines[5:]]) for name in PHASES}
    first = lines[0]["buckets"][0]["numel"] / sum(bucket["numel"] for bucket in lines[0]["buckets"])
    assert list(run.shares) == ["topk 0.01 by allgather", "dense by allreduce"]
    assert run.shares["dense by allreduce"].tolist() == [0] * 15 + [first] * 5
    assert sum(run.plans.values()) == pytest.approx(1)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_read_lines_with_a_torn_line_and_not_json_numbers(tmp_path, number):
    path = tmp_path / "m.jsonl"
    write_lines(path, 10, change=lambda step, line: line.update(loss=number if step == 9 else 1.0))
    assert json.dumps(number) in path.read_text()
    path.write_text(path.read_text() + '{"schema": 1, "step": 10, "seco')
    assert [line.loss for line in read_lines(str(path))] == [1.0] * 9 + [None]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.jsonl": '{"step": 0}\n'}, "line 1 of '.*a.jsonl' is no step of --metrics"),
        ({"a.jsonl": ""}, "holds no step"),
        ({"a.json": '{"rows": []}'}, "was not written by train .*missing required field `task`"),
        ({"a.json": "[1]"}, "was not written by train .*got `array`"),
        ({}, "cannot be read: No such file"),
    ],
)
def test_read_runs_refuses_other_files(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_runs([str(tmp_path / name) for name in files or ["a.json"]])


def test_read_runs_joins_files_of_one_name(tmp_path):
    for name in ("lab-auto", "lab-topk"):
        write_lines(tmp_path / f"{name}.jsonl", 20)
        write_outcome(tmp_path / f"{name}.json", 20)
    runs = read_runs([str(path) for path in sorted(tmp_path.iterdir())])
    assert [run.name for run in runs] == ["lab-auto", "lab-topk"]
    assert all(run.outcome is not None and run.lines for run in runs)
    write_outcome(tmp_path / "lab-topk.json", 21)
    with pytest.raises(ConfigurationError, match="--json has 21 steps, --metrics 20"):
        read_runs([str(tmp_path / "lab-topk.json"), str(tmp_path / "lab-topk.jsonl")])
    write_outcome(tmp_path / "other.json", 20, task="text-gpt")
    with pytest.raises(ConfigurationError, match=r"runs of one task can be compared, got digits \(lab-auto\) and text"):
        read_runs([str(tmp_path / "lab-auto.json"), str(tmp_path / "other.json")])


def test_points_hold_every_step_once():
    values = np.random.default_rng(0).normal(size=163)
    values[40:60] = np.nan
    ends, low, middle, high = points(np.arange(163.0), values)
    for first, end, *found in zip([0, *(ends[:-1] + 1)], ends + 1, low, middle, high, strict=True):
        known = values[int(first) : int(end)]
        known = known[np.isfinite(known)]
        wanted = (known.min(), np.median(known), known.max()) if known.size else [np.nan] * 3
        np.testing.assert_allclose(found, wanted)


def test_verdict_ranks_runs_by_quality(tmp_path):
    """The quickest step never gets there; of the other two, the one with the shorter steps is there first."""

    def reaching(best):
        return lambda step, line: line.update(quality=best * (1 - math.exp(-step / 20)) if step % 5 == 4 else None)

    for name, step_s, best in (("dense", 0.1, 0.97), ("quick", 0.001, 0.6), ("auto", 0.01, 0.97)):
        write_lines(tmp_path / f"{name}.jsonl", 100, step_s=step_s, change=reaching(best))
        config = {"id": "dense"} if name == "dense" else {"id": "topk", "ratio": 0.01}
        plan = {"compressor": config["id"], "compressor_config": config, "ratio": 1.0, "collective": "ring"}
        write_outcome(tmp_path / f"{name}.json", 100, step_s=step_s, quality=best, plans=[plan | {"share": 1.0}])
    write_outcome(tmp_path / "quick.json", 100, step_s=0.001, quality=0.6, ranks=4)
    sentences = verdict(read_runs([str(path) for path in sorted(tmp_path.iterdir())]))
    assert re.match(r"auto comes first: it reaches a held-out accuracy of 0\.9\d+ after", sentences[0])
    assert "; dense needs " in sentences[0]
    assert sentences[0].endswith("; quick does not reach it.")
    assert sentences[1] == "Held-out accuracy in the end, higher is better: auto 0.97, dense 0.97 and quick 0.6."
    assert sentences[2].startswith("A step takes, and sends from a rank: quick 1 ms and")
    assert sentences[3].startswith("The runs differ in ranks (auto 2, dense 2, quick 4) and hosts")
    assert sentences[3].endswith("One run of each: only runs of other seeds show differences by chance.")


def test_verdict_has_the_seconds_to_the_reference(tmp_path):
    """Steps of a tenth of a second whose loss falls by one a step from 100: 95 % of the way is at loss 5."""
    for name, lag in (("dense", 0), ("slow", 40)):
        change = lambda step, line, lag=lag: line.update(seconds=0.1, loss=float(max(0, 100 + lag - step)))  # noqa: E731
        write_lines(tmp_path / f"{name}.jsonl", 200, change=change)
    [race, *_] = verdict(read_runs([str(tmp_path / "dense.jsonl"), str(tmp_path / "slow.jsonl")]))
    # Points are medians of 5 steps: the first one below 5 ends with step 99 at loss 3, and with step 139.
    assert "after 10 s" in race
    assert "slow needs 14 s, 1.4 times as long" in race


class Page(HTMLParser):
    """Collects tags with their attributes, and refuses tags that are not closed."""

    EMPTY = ("meta", "link", "br", "img")

    def __init__(self, text):
        super().__init__()
        self.tags, self._open = [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def of(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.mark.parametrize(
    ("kinds", "pictures"),
    [(["json"], ["step", "bytes"]), (["json", "jsonl"], ["loss", "step", "bytes", "chosen"])],
)
def test_page_is_complete_and_loads_nothing(tmp_path, kinds, pictures):
    def change(step, line):
        if step > 50:
            line["buckets"][0]["compressor"], line["buckets"][0]["collective"] = {"id": "dense"}, "ring"

    names = "auto", "a run & <more>"
    for name in names:
        write_lines(tmp_path / f"{name}.jsonl", 100, buckets=3, change=change)
        write_outcome(tmp_path / f"{name}.json", 100, delay=None)
    files = [f"{name}.{kind}" for name in names for kind in kinds]
    text = report(tmp_path, *files)
    page = Page(text)
    assert page.of("script") == []
    assert "http://" not in text
    assert "https://" not in text
    assert all(attrs["href"].startswith("data:") for attrs in page.of("link"))
    assert all(attrs["src"].startswith("data:image/svg+xml;base64,") for attrs in page.of("img"))
    assert all(re.search(r"\d", attrs["alt"]) for attrs in page.of("img"))
    assert len(page.of("img")) == len(pictures)
    assert {attrs["id"] for attrs in page.of("section")} == {*pictures, "chosen", "runs"}
    assert re.search(r"\bnan\b", text) is None


def test_report_of_records_without_loss_and_phases(tmp_path):
    """A script of a user writes the records of its reducer."""
    reducer = mpicomp.Reducer("topk", "allgather", comm=LocalWorld(1).transports[0])
    with open(tmp_path / "script.jsonl", "w") as file:
        for step in range(12):
            reducer.reduce({"w": np.arange(step, step + 100, dtype=np.float32)}, lr=0.1)
            file.write(json.dumps(reducer.last_step.to_json()) + "\n")
    text = report(tmp_path, "script.jsonl")
    assert re.findall(r'<section id="(\w+)"', text) == ["step", "bytes", "chosen", "runs"]
    assert "12 steps" in text
    assert re.search(r"\bnan\b", text) is None


def test_failed_write_keeps_the_page_before(tmp_path, capsys):
    """No file may be longer than 2 KiB: what was begun is removed."""
    page = tmp_path / "F.html"
    page.write_text("the one before")
    write_outcome(tmp_path / "auto.json", 20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        assert cli.main(["report", str(tmp_path / "auto.json"), "-o", str(page)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "F.html' cannot be written" in capsys.readouterr().err
    assert page.read_text() == "the one before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["F.html", "auto.json"]


def test_report_without_a_library_names_the_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "jinja2" else sys)
    assert cli.main(["report", "a.json", "-o", str(tmp_path / "F.html")]) == 2
    message = capsys.readouterr().err
    assert "report: needs jinja2: pip install 'mpicomp[report]'" in message
