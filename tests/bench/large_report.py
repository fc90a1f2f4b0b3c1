"""Size and seconds of the report of a long run: python tests/bench/large_report.py [STEPS LAYERS]."""

import os
import sys
import tempfile
from pathlib import Path
from time import process_time as seconds  # the machine may be shared

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
import numpy as np  # noqa: E402
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
    step_s, line_s = cost_of_metrics(layers)
    print(f"a line of --metrics: {1e6 * line_s:.0f} us, {100 * line_s / step_s:.2f} % of what reduce takes by itself")


def cost_of_metrics(layers, numel=100_000, repeats=50):
    """Return the seconds of a reduce of so many layers on one rank, and of writing its line."""
    from mpicomp.bench.measure.metrics import MetricsWriter

    import mpicomp
    from mpicomp.transport import LocalWorld

    rng = np.random.default_rng(0)
    gradients = {f"blocks.{place}.weight": rng.normal(size=numel).astype(np.float32) for place in range(layers)}
    reducer = mpicomp.Reducer("topk", "allgather", comm=LocalWorld(1).transports[0])
    fields = {"seconds": 1.0, "phases_s": {}, "loss": 1.0, "quality": None}
    steps, records = [], []
    with tempfile.TemporaryDirectory() as folder, MetricsWriter(f"{folder}/m.jsonl") as metrics:
        for _ in range(repeats):
            begin = seconds()
            reducer.reduce(gradients, lr=0.1)
            steps.append(seconds() - begin)
            records.append(reducer.last_step)
        begin = seconds()
        for record in records:
            metrics.write(lambda record=record: record.to_json() | fields)
        metrics.flush()
        return np.median(steps), (seconds() - begin) / repeats


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
