"""Size and seconds of the report of a long run: python tests/bench/large_report.py [STEPS LAYERS]."""

import os
import sys
import tempfile
from pathlib import Path
from time import process_time as seconds  # the machine may be shared

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
from recordings import write_lines, write_outcome  # noqa: E402


def main(steps=10_000, layers=100):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_lines(folder / "run.jsonl", steps, layers, buckets=max(1, layers // 10), every=100)
        write_outcome(folder / "run.json", steps, ranks=64, layers=layers)
        print(f"{steps} steps of {layers} layers: {(folder / 'run.jsonl').stat().st_size / 1e6:.0f} MB of --metrics")
        begin = seconds()
        from mpicomp.bench.report.runs import read_runs
        from mpicomp.bench.report.write import draw_report

        loaded = seconds()
        runs = read_runs([str(folder / "run.json"), str(folder / "run.jsonl")])
        read = seconds()
        draw_report(runs, str(folder / "F.html"), None)
        drawn = seconds()
        size = os.path.getsize(folder / "F.html")
    parts = f"loading {loaded - begin:.2f} s, reading {read - loaded:.2f} s, drawing {drawn - read:.2f} s"
    print(f"of the processor: {parts}; the page has {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
