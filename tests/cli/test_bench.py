"""``mpicomp bench`` as a user starts it."""

import importlib.util
import json

import pytest
from marks import slow

from mpicomp.cli import main

KERNELS = ["bench", "kernels", "--numel", "3000", "--ratio", "0.1", "--repeats", "2"]
COLLECTIVES = ["bench", "collectives", "--numel", "3000", "--ratio", "0.1", "--limit", "0.05"]
TRAINING = ["bench", "training", "--task", "digits", "--steps", "6", "--blocks", "6", "--warm-up", "1"]


def table(text):
    """Return the lines of a plain table below its header, split into words."""
    lines = [line.split() for line in text.splitlines()]
    header = next(index for index, words in enumerate(lines) if words[:1] == ["name"])
    return lines[header], lines[header + 1 :]


def test_kernels_print_the_rows_that_they_write(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main([*KERNELS, "--compressor", "topk", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert set(written) == {"schema", "environment", "rows"}
    assert written["schema"] == 1
    assert written["environment"]["threads"] == 1
    header, lines = table(capsys.readouterr().out)
    assert header[:4] == ["name", "ratio", "median_s", "copies"]
    assert [line[0] for line in lines] == [row["name"] for row in written["rows"]]
    assert lines[0][0] == "memcpy"
    assert "topk.compress" in [line[0] for line in lines]


def test_compressors_are_named_or_configured(tmp_path):
    path = tmp_path / "out.json"
    words = 'topk,{"id": "topk", "wire": "fp16"}, {"id": "topk", "ratio": 0.5}'
    options = ["--ratio", "0.1,0.2,0.1", "--compressor", words, "--json", str(path)]
    assert main([*KERNELS, *options]) == 0
    rows = [row for row in json.loads(path.read_text())["rows"] if row["name"] == "topk.compress"]
    configs = [(row["ratio"], row["config"]["wire"]) for row in rows]
    assert configs == [(0.1, None), (0.2, None), (0.1, "fp16"), (0.2, "fp16"), (0.5, None)]
    assert [row["ratio_reached"] for row in rows] == [0.1, 0.2, 0.1, 0.2, 0.5]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([*KERNELS, "--numel", "0"], "bench kernels: --numel must be an integer of at least 1, got 0"),
        ([*KERNELS, "--numel", "4294967296"], "bench kernels: --numel must be below 2**32"),
        ([*KERNELS, "--repeats", "0"], "bench kernels: --repeats must be an integer of at least 1, got 0"),
        ([*KERNELS, "--ratio", "0.1,0"], "bench kernels: ratio is the kept fraction and must be in (0, 1], got 0.0"),
        ([*KERNELS, "--ratio", "one"], "bench kernels: --ratio must be numbers such as 0.001,0.01, got 'one'"),
        ([*KERNELS, "--compressor", "dense"], "'dense' neither selects nor packs on the cpu; there are "),
        ([*KERNELS, "--compressor", '{"id": '], "bench kernels: --compressor must be a name or JSON"),
        ([*KERNELS, "--compressor", " ,"], "bench kernels: --compressor names nothing"),
        ([*COLLECTIVES, "--numel", "many"], "bench collectives: --numel must be whole numbers such as 1024,1048576"),
        ([*COLLECTIVES, "--numel", "4294967296"], "bench collectives: --numel must be below 2**32, got 4294967296"),
        ([*COLLECTIVES, "--collective", ","], "bench collectives: --collective names nothing"),
        ([*COLLECTIVES, "--collective", "allgathr"], "unknown name 'allgathr'; did you mean 'allgather'?"),
        ([*COLLECTIVES, "--collective", "star-topk:allgather"], "dense: does not fit collective 'allgather'"),
        ([*COLLECTIVES, "--limit", "0"], "bench collectives: --limit must be a number of seconds above 0, got 0.0"),
        (
            [*COLLECTIVES, "--calibrate", "a", "--from", "b"],
            "--calibrate measures the model that --from reads; give one of them",
        ),
        ([*TRAINING, "--task", "digit"], "task: unknown name 'digit'; did you mean 'digits'?"),
        ([*TRAINING, "--exchange", "none,topq"], "--exchange: unknown name 'topq'; did you mean 'topk'?"),
        ([*TRAINING, "--exchange", "topk:ring"], "topk: does not fit collective 'ring'"),
        ([*TRAINING, "--exchange", "updates:ddp"], "none with updates:, got 'updates:ddp'; name 'ddp'"),
        ([*TRAINING, "--exchange", "updates:topk-inline"], "updates are there after backward in any case"),
        ([*TRAINING, "--every", "2"], "--every must divide the steps of a block and of the warm-up, 1 and 1"),
        ([*TRAINING, "--exchange", "ddp-inline"], "'ddp' has no other collective, no form in line"),
        ([*TRAINING, "--exchange", ","], "bench training: --exchange names nothing"),
        ([*TRAINING, "--steps", "7"], "bench training: --steps must be a multiple of --blocks, got 7 and 6"),
        ([*TRAINING, "--json", "/nonexistent/out.json"], "bench training: '/nonexistent/out.json' cannot be written"),
    ],
)
def test_bad_options_are_refused_before_measuring(arguments, text, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("mpicomp: ")
    assert text in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_missing_cupy_is_reported(mpiexec):
    done = mpiexec(1, "-m", "mpicomp", *COLLECTIVES, "--device", "gpu")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = [line for line in done.stderr.splitlines() if line.startswith("mpicomp: ")]
    assert line.startswith("mpicomp: bench collectives: --device gpu needs CuPy (")
    assert "; pip install 'mpicomp[cuda12]'" in line


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "kernel"], ["bench", "kernels", "--numel", "many"]])
def test_unknown_words_show_the_usage(arguments, capsys):
    assert main(arguments) == 2
    assert "usage: mpicomp bench" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [slow(1), slow(2), 3])
def test_collectives_are_timed_and_printed_once(mpiexec, tmp_path, ranks):
    json_path = tmp_path / "out.json"
    words = [*COLLECTIVES, "--collective", "allgather,allreduce,auto", "--json", json_path]
    done = mpiexec(ranks, "-m", "mpicomp", *words, timeout=100)
    assert done.returncode == 0, done.stderr
    written = json.loads(json_path.read_text())["rows"]
    assert [row["collective"] for row in written if row["compressor"] == "topk"] == ["allgather", "auto"]
    assert [row["collective"] for row in written if row["compressor"] == "none"] == ["MPI_Allreduce"]
    assert {row["ranks"] for row in written} == {ranks}
    assert all(row["correct"] for row in written if row["compressor"] != "none")
    assert done.stdout.count("left out: topk: does not fit collective 'allreduce'") == 1
    assert done.stdout.count("# mpicomp topk at ratio 0.1, allgather: float32") == 1
    header = next(line.split() for line in done.stdout.splitlines() if line.startswith("compressor"))
    assert header[:5] == ["compressor", "ratio", "collective", "numel", "median_s"]


@pytest.mark.slow
def test_wrong_mean_ends_with_status_1(mpiexec):
    code = """if True:
        import sys
        from mpicomp.collectives.allgather import Allgather
        right = Allgather.exchange

        def wrong(self, accumulated, context):
            result = yield from right(self, accumulated, context)
            write = result.mean

            def write_more(out):
                write(out)
                out *= 1.01

            result.mean = write_more
            return result

        Allgather.exchange = wrong
        from mpicomp.cli import main
        sys.exit(main(sys.argv[1:]))"""
    done = mpiexec(2, "-c", code, *COLLECTIVES, "--collective", "allgather", timeout=60)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("WRONG: topk allgather with 3000 elements") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_cost_model_is_written_and_read(mpiexec, tmp_path):
    path = tmp_path / "cost.json"
    done = mpiexec(2, "-m", "mpicomp", "bench", "collectives", "--calibrate", path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"bench collectives: the cost model was written to {path}\n"
    rows_path = tmp_path / "rows.json"
    words = [*COLLECTIVES, "--collective", "allgather", "--from", path, "--json", rows_path]
    done = mpiexec(2, "-m", "mpicomp", *words, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = json.loads(rows_path.read_text())["rows"]
    assert all(row["predicted_s"] > 0 for row in rows if row["compressor"] != "none")  # MPI's sum has no model
