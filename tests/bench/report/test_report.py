"""The report: reading of files, the verdict, and the page."""

import json
import math
import re
import resource
import sys
from html.parser import HTMLParser
from itertools import combinations
from statistics import median

import numpy as np
import pytest
from browser import BROWSER, DRIVER, Browser
from marks import slow
from recordings import PHASES, write_lines, write_outcome

pytest.importorskip("matplotlib")
pytest.importorskip("msgspec")

from mpicomp.bench.report.draw import DARK, LIGHT
from mpicomp.bench.report.runs import read_lines, read_runs
from mpicomp.bench.report.section_parts import Bins
from mpicomp.bench.report.write import verdict

import mpicomp
from mpicomp import cli
from mpicomp.errors import ConfigurationError
from mpicomp.transport import LocalWorld


def report(folder, *names, more=()):
    """Write a report of files of a folder and return its text."""
    page = folder / "F.html"
    assert cli.main(["report", *(str(folder / name) for name in names), "-o", str(page), *more]) == 0
    return page.read_text()


def test_read_lines_gives_arrays_over_steps(tmp_path):
    path = tmp_path / "m.jsonl"
    write_lines(path, 30, layers=5, buckets=2)
    read = read_lines(str(path))
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for name in ("step", "seconds", "loss", "wire_bytes", "dense_wire_bytes"):
        assert getattr(read, name).tolist() == [line[name] for line in lines]
    assert read.phases.tolist() == [[line["phases_s"][name] for name in PHASES] for line in lines]
    assert [int(step) for step in read.step[np.isfinite(read.quality)]] == [9, 19, 29]
    layers = [[layer for bucket in line["buckets"] for layer in bucket["layers"]] for line in lines]
    assert read.layers.names == [layer["name"] for layer in layers[0]]
    assert read.layers.numels == [layer["numel"] for layer in layers[0]]
    for name in ("ratio", "gain"):
        assert getattr(read.layers, name).tolist() == [[layer[name] for layer in step] for step in layers]
    for row, line in enumerate(lines):
        buckets = line["buckets"]
        numel = sum(bucket["numel"] for bucket in buckets)
        kept = sum(bucket["ratio_reached"] * bucket["numel"] for bucket in buckets)
        waiting = sum((1 - bucket["gain"]) * bucket["energy"] for bucket in buckets)
        sent = sum(bucket["gain"] * bucket["energy"] for bucket in buckets)
        measured = sum(sum(bucket["phases_s"].values()) for bucket in buckets)
        assert read.ratio[row] == pytest.approx(kept / numel)
        assert read.delay[row] == pytest.approx(waiting / sent)
        assert read.predicted[row] == pytest.approx(sum(bucket["predicted_s"] for bucket in buckets))
        assert read.measured[row] == pytest.approx(measured)


def test_read_lines_with_changing_plans_and_layers(tmp_path):
    def change(step, line):
        bucket = line["buckets"][0]
        if step >= 15:
            bucket["compressor"], bucket["collective"] = {"id": "dense"}, "allreduce"
            bucket["gain"] = bucket["energy"] = bucket["predicted_s"] = None
        if step >= 10:
            del bucket["layers"][0]
            bucket["layers"].reverse()
            bucket["layers"][0]["gain"] = None

    write_lines(tmp_path / "m.jsonl", 20, layers=3, change=change)
    read = read_lines(str(tmp_path / "m.jsonl"))
    assert read.plans == ["topk 0.01 by allgather", "dense by allreduce"]
    assert read.shares.tolist() == [[1, 0]] * 15 + [[0, 1]] * 5
    assert np.isnan(read.delay).tolist() == np.isnan(read.predicted).tolist() == [False] * 15 + [True] * 5
    assert read.layers.names == [f"blocks.{number}.weight" for number in range(3)]
    assert np.isnan(read.layers.ratio[:, 0]).tolist() == [False] * 10 + [True] * 10
    assert np.isnan(read.layers.gain[:, 2]).tolist() == [False] * 10 + [True] * 10
    last = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[-1])["buckets"][0]["layers"]
    assert read.layers.ratio[-1, 1] == next(layer["ratio"] for layer in last if layer["name"] == "blocks.1.weight")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_read_lines_with_a_torn_line_and_not_json_numbers(tmp_path, number):
    path = tmp_path / "m.jsonl"
    write_lines(path, 10, change=lambda step, line: line.update(loss=number if step == 9 else 1.0))
    assert json.dumps(number) in path.read_text()
    path.write_text(path.read_text() + '{"schema": 1, "step": 10, "seco')
    read = read_lines(str(path))
    assert read.step.size == 10
    assert np.isnan(read.loss).tolist() == [False] * 9 + [True]
    assert read.plans == ["topk 0.01 by allgather"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.jsonl": '{"step": 0}\n'}, "line 1 of '.*a.jsonl' is no step of --metrics"),
        ({"a.jsonl": ""}, "holds no step"),
        ({"a.json": '{"rows": []}'}, "has no field 'dense_wire_bytes', so train has not written it"),
        ({"a.json": "[1]"}, "is no file that train has written"),
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
    assert [run.name for run in runs] == ["auto", "topk"]
    assert all(run.outcome is not None and run.recorded is not None for run in runs)
    write_outcome(tmp_path / "lab-topk.json", 21)
    with pytest.raises(ConfigurationError, match="--json has 21 steps, --metrics 20"):
        read_runs([str(tmp_path / "lab-topk.json"), str(tmp_path / "lab-topk.jsonl")])
    write_outcome(tmp_path / "other.json", 20, task="vgg")
    with pytest.raises(ConfigurationError, match=r"runs of one task can be compared, got digits \(lab-auto\) and vgg"):
        read_runs([str(tmp_path / "lab-auto.json"), str(tmp_path / "other.json")])


@pytest.mark.parametrize("steps", [1, 7, 39, 40, 163, 10_000])
def test_bins_hold_every_step_once(steps):
    values = np.random.default_rng(steps).normal(size=(steps, 3))
    values[:: max(2, steps // 3), 1] = np.nan
    values[: steps // 2, 2] = np.nan
    bins = Bins.of(steps)
    assert bins.edges[0] == 0
    assert bins.edges[-1] == steps
    assert bins.edges.size - 1 <= 100
    statistics = {"min": min, "median": median, "max": max, "mean": lambda known: sum(known) / len(known)}
    for name, plain in statistics.items():
        found = bins.reduce(name, values)
        for row, (first, end) in enumerate(zip(bins.edges, bins.edges[1:], strict=False)):
            for column in range(3):
                known = [value for value in values[first:end, column] if not math.isnan(value)]
                assert found[row, column] == pytest.approx(plain(known) if known else math.nan, nan_ok=True)


def test_verdict_ranks_runs_by_quality(tmp_path):
    """The quickest step never gets there; of the other two, the one with the shorter steps is there first."""

    def reaching(best):
        return lambda step, line: line.update(quality=best * (1 - math.exp(-step / 20)) if step % 5 == 4 else None)

    for name, step_s, best in (("dense", 0.1, 0.97), ("quick", 0.001, 0.6), ("auto", 0.01, 0.97)):
        write_lines(tmp_path / f"{name}.jsonl", 100, step_s=step_s, change=reaching(best))
        config = {"id": "dense"} if name == "dense" else {"id": "topk", "ratio": 0.01}
        plans = [{"compressor": config["id"], "compressor_config": config, "collective": "ring", "share": 1.0}]
        write_outcome(tmp_path / f"{name}.json", 100, step_s=step_s, quality=best, plans=plans)
    sentences = verdict(read_runs([str(path) for path in sorted(tmp_path.iterdir())]))
    assert re.match(r"auto comes first: it reaches a held-out accuracy of 0\.9\d+ after", sentences[0])
    assert "; dense needs " in sentences[0]
    assert sentences[0].endswith("; quick does not reach it.")
    assert sentences[1] == "Held-out accuracy in the end, higher is better: auto 0.97, dense 0.97 and quick 0.6."
    assert sentences[2].startswith("A step takes, and sends from a rank: quick 1 ms and")
    assert sentences[3] == "One run of each: only runs of other seeds show what differs by chance."


def test_verdict_has_the_seconds_to_the_reference(tmp_path):
    """Steps of a tenth of a second whose loss falls by one a step from 100: 95 % of the way is at loss 5."""
    for name, lag in (("dense", 0), ("slow", 40)):
        change = lambda step, line, lag=lag: line.update(seconds=0.1, loss=float(max(0, 100 + lag - step)))  # noqa: E731
        write_lines(tmp_path / f"{name}.jsonl", 200, change=change)
    [race, *_] = verdict(read_runs([str(tmp_path / "dense.jsonl"), str(tmp_path / "slow.jsonl")]))
    # Points are medians of 5 steps: the first one below 5 ends with step 99 at loss 3, and with step 139.
    assert "after 10 s" in race
    assert "slow needs 14 s, 1.4 times as long" in race


def test_verdict_names_other_differences_of_runs(tmp_path):
    for name, ranks in (("one", 2), ("two", 4)):
        write_outcome(tmp_path / f"{name}.json", 20, ranks=ranks, shard=ranks // 2)
    sentences = verdict(read_runs([str(tmp_path / "one.json"), str(tmp_path / "two.json")]))
    found = "The runs differ in ranks (one 2, two 4), shard (one 1, two 2) and hosts (one 2, two 4), too."
    assert sentences[-1].startswith(found)


class Page(HTMLParser):
    """Collects tags with their attributes, and refuses tags that are not closed."""

    EMPTY = ("meta", "link", "br", "path", "rect", "image", "use")

    def __init__(self, text):
        super().__init__()
        self.tags, self._open = [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.EMPTY:
            assert self._open.pop() == tag

    def of(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with two runs, one of which has changing plans, both odd names."""
    folder = tmp_path_factory.mktemp("runs")

    def change(step, line):
        bucket = line["buckets"][0]
        bucket["layers"][0]["name"] = "<script>alert(1)</script>&amp;"
        if step > 50:
            bucket["compressor"], bucket["collective"] = {"id": "dense"}, "recursive-doubling"

    write_lines(folder / "auto.jsonl", 100, buckets=3, change=change)
    write_outcome(folder / "auto.json", 100, ranks=3, policy="auto")
    write_lines(folder / "a run & <more>.jsonl", 100, layers=200, step_s=0.05, seed=1)
    write_outcome(folder / "a run & <more>.json", 100, step_s=0.05, delay=None)
    return folder


@pytest.fixture(scope="module")
def compared(folder):
    """Write the report of both runs."""
    report(folder, *sorted(path.name for path in folder.iterdir()))
    return folder / "F.html"


PICTURES = {(0, False): 17, (1, False): 2, (1, True): 11, (2, True): 12}


@pytest.mark.parametrize("names", [[], ["auto.json"], slow(["auto.jsonl"]), slow(["auto.json", "auto.jsonl"])])
def test_page_is_complete_and_loads_nothing(folder, compared, tmp_path, names):
    for name in names:
        (tmp_path / name).write_text((folder / name).read_text())
    text = report(tmp_path, *names) if names else compared.read_text()
    page = Page(text)
    assert page.of("script") == []
    assert re.findall(r"https?://(?!www\.w3\.org/(?:2000/svg|1999/xlink)\")", text) == []
    assert all(attrs["href"].startswith("data:") for attrs in page.of("link"))
    assert all(attrs["href"].startswith("#") for attrs in page.of("a"))
    assert all(attrs["xlink:href"].startswith("data:image/png") for attrs in page.of("image"))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
    links += [name for _, attrs in page.tags for name in attrs.get("aria-labelledby", "").split()]
    assert set(links) <= set(ids)
    pictures = [attrs for attrs in page.of("svg") if "aria-hidden" not in attrs]
    assert len(pictures) == len(page.of("figure")) == PICTURES[len(names), names[-1:] == ["auto.jsonl"]]
    assert all(attrs["role"] == "img" for attrs in pictures)
    for words in re.findall(r"<desc[^>]*>(.*?)</desc>", text):
        assert re.search(r"\d", words)
    assert len(page.of("details")) == len(pictures)
    scrolls = [attrs for attrs in page.of("div") if attrs.get("class") == "scroll"]
    assert all(attrs["tabindex"] == "0" and attrs["aria-label"] for attrs in scrolls)
    assert re.search(r"\bnan\b", text) is None
    # Every colour of a picture but those of maps is one of the page's, so that it changes with the page.
    drawn = "".join(re.findall(r"<figure>.*?</figure>", text, flags=re.DOTALL))
    assert set(re.findall(r"(?:fill|stroke): ([^;\"]+)", drawn)) <= {"none", *(f"var(--{token})" for token in LIGHT)}


def test_report_writes_every_section_and_picture(folder, tmp_path):
    for name in ("auto.json", "auto.jsonl"):
        (tmp_path / name).write_text((folder / name).read_text())
    pictures = tmp_path / "pictures"
    text = report(tmp_path, "auto.json", "auto.jsonl", more=["--pictures", str(pictures)])
    sections = re.findall(r'<section id="(\w+)"', text)
    assert sections == ["loss", "seconds", "chosen", "behind", "predicted", "ranks", "runs"]
    wanted = {"loss-steps", "loss-seconds", "loss-bytes", "quality-seconds", "step-by-phase", "phases-auto"}
    wanted |= {"plans-auto", "ratio-auto", "gain-auto", "predicted-auto", "ranks-auto", "steps-behind"}
    assert {path.stem for path in pictures.iterdir()} == wanted
    for name in wanted:
        assert (pictures / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "var(--" not in (pictures / f"{name}.svg").read_text()  # a file has no page with colours


def test_report_of_records_without_loss_and_phases(tmp_path):
    """A script of a user writes the records of its reducer."""
    reducer = mpicomp.Reducer("topk", "allgather", comm=LocalWorld(1).transports[0])
    with open(tmp_path / "script.jsonl", "w") as file:
        for step in range(12):
            reducer.reduce({"w": np.arange(step, step + 100, dtype=np.float32)}, lr=0.1)
            file.write(json.dumps(reducer.last_step.to_json()) + "\n")
    text = report(tmp_path, "script.jsonl")
    assert re.findall(r'<section id="(\w+)"', text) == ["seconds", "chosen", "behind", "runs"]
    assert "12 steps" in text
    assert re.search(r"\bnan\b", text) is None


def linear_rgb(colour):
    parts = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """Return the contrast of two colours as WCAG 2.2 defines it."""
    high, low = sorted((float(linear_rgb(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_contrast(colours):
    for token, colour in colours.items():
        if token in ("ground", "line"):
            continue
        least = 3 if token in PHASES else 4.5  # runs' colours are also those of their names
        assert contrast(colour, colours["ground"]) >= least, token


# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as it is seen.
WEAKNESSES = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(colour, weakness):
    """Return CIE L*a*b* of a colour as it is seen."""
    seen = np.clip(np.array(weakness) @ linear_rgb(colour), 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ seen / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("weakness", WEAKNESSES)
@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colors_are_distinct(colours, weakness):
    for tokens in (PHASES, ("run0", "run1", "run2", "run3"), ("run4", "run5", "run6", "run7")):
        for one, other in combinations(tokens, 2):
            distance = lab(colours[one], WEAKNESSES[weakness]) - lab(colours[other], WEAKNESSES[weakness])
            assert np.linalg.norm(distance) > 18, (one, other)


def test_failed_write_keeps_the_page_before(folder, tmp_path, capsys):
    """No file may be longer than 2 KiB: what was begun is removed."""
    page = tmp_path / "F.html"
    page.write_text("the one before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        assert cli.main(["report", str(folder / "auto.json"), "-o", str(page)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "F.html' cannot be written" in capsys.readouterr().err
    assert page.read_text() == "the one before"
    assert [path.name for path in tmp_path.iterdir()] == ["F.html"]


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib", "msgspec"])
def test_report_without_a_library_names_the_install(monkeypatch, capsys, tmp_path, missing):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == missing else sys)
    assert cli.main(["report", "a.json", "-o", str(tmp_path / "F.html")]) == 2
    message = capsys.readouterr().err
    assert f"a report is drawn with {missing}, which is not installed" in message
    assert "pip install 'mpicomp[report]'" in message


OVER = """
const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
const over = [];
for (const node of document.querySelectorAll("body *")) {
  const box = node.getBoundingClientRect();
  const out = box.width && (box.right > innerWidth + 1 || box.left < -1);
  if (out && !node.closest(".scroll, svg, .skip"))
    over.push(node.tagName + " " + node.textContent.slice(0, 30));
}
for (const svg of document.querySelectorAll("figure svg")) {
  const all = svg.getBoundingClientRect();
  for (const node of svg.querySelectorAll("text")) {
    const box = node.getBoundingClientRect();
    if (box.left < all.left - 1 || box.right > all.right + 1 || box.top < all.top - 1 || box.bottom > all.bottom + 1)
      over.push("text " + node.textContent);
  }
}
return [wide, over];
"""
COLOURS = """
const text = document.querySelector("figure svg text");
return [getComputedStyle(document.body).backgroundColor, getComputedStyle(text).fill];
"""
SMALLEST = """
return Math.min(...[...document.querySelectorAll("figure svg text")].map(node => {
  const svg = node.closest("svg");
  return parseFloat(getComputedStyle(node).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
}));
"""


@pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs Chromium and its driver: apt install chromium-driver")
def test_page_fits_every_window_of_a_browser(compared, tmp_path):
    with Browser(tmp_path / "browser") as browser:
        for width, height in ((1280, 800), (360, 740)):
            for dark in (False, True):
                console, asked = browser.show(compared, width, height, dark)
                assert console == []
                assert asked == []
                assert browser.ask(OVER) == [False, []]
                ground, ink = browser.ask(COLOURS)
                colours = DARK if dark else LIGHT
                assert (ground, ink) == (_rgb(colours["ground"]), _rgb(colours["soft"]))
                assert browser.ask(SMALLEST) >= 10
        assert browser.ask("return [...document.querySelectorAll('figure svg')].every(svg => svg.clientHeight > 60)")
        browser.press("Tab")
        assert browser.ask("return document.activeElement.className") == "skip"
        for _ in range(60):
            browser.press("Tab")
            if browser.ask("return document.activeElement.tagName") == "SUMMARY":
                break
        browser.press("Enter")
        assert browser.ask("return document.activeElement.parentElement.open")
        assert browser.ask(OVER) == [False, []]


def _rgb(colour):
    return f"rgb({', '.join(str(int(colour[start : start + 2], 16)) for start in (1, 3, 5))})"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_page_of_a_long_run_is_small(tmp_path):
    write_lines(tmp_path / "run.jsonl", 10_000, layers=100, buckets=10, every=100)
    write_outcome(tmp_path / "run.json", 10_000, ranks=64, layers=100)
    assert len(report(tmp_path, "run.json", "run.jsonl").encode()) < 5e6
