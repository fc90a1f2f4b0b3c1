"""One training with mpicomp's exchanges and with those of others, in turn in a lab: ``python studies/peers.py``."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lab_jobs
from lab_jobs import Network
from mpicomp.bench.training_rows import OTHERS

from mpicomp.cli import run_program
from mpicomp.cli.options import read_list
from mpicomp.errors import ConfigurationError
from mpicomp.setting_checks import check_least
from mpicomp.system import launcher

_STUDY = "peers"
_OURS = ("dense", "auto", "topk:allgather", "topk:allgather-inline", "qsgd", "updates:topk")
_END_THE_JOB = ("ddp-bf16", "ddp-powersgd")  # over gloo: docs/results.md says how
_BLOCKS = 8


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="studies/peers.py",
        description="Train with all exchanges, block by block in turn in one job, so that what else the machine does "
        "meets all of them, and print a table. A job that fails, or does not end, is rows that say so. What is in the "
        "folder is not run again.",
    )
    parser.add_argument("--folder", default=_STUDY, help="where results are kept (%(default)s)")
    parser.add_argument("--task", default="text-gpt,text-lstm", metavar="T[,..]", help="as of mpicomp train")
    lab_jobs.add_lab(parser, "200mbit/50us")
    parser.add_argument("--exchange", default=",".join((*OTHERS, *_OURS)), metavar="X[,..]", help="(%(default)s)")
    alone = ",".join(_END_THE_JOB)
    parser.add_argument("--alone", default=alone, metavar="X[,..]", help="each in a job of its own (%(default)s)")
    parser.add_argument("--ratio", type=float, default=0.01, metavar="R", help="kept fraction (%(default)s)")
    parser.add_argument("--every", type=int, default=4, metavar="H", help="steps between updates (%(default)s)")
    parser.add_argument(
        "--steps", type=int, default=32, metavar="S", help="that count, a multiple of 8 H (%(default)s)"
    )
    parser.add_argument("--warm-up", type=int, default=24, metavar="W", help="steps before, a multiple of H")
    parser.add_argument("--limit", type=float, default=1800, metavar="S", help="seconds of a job (%(default)s)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run what is not there yet, and print."""
    if launcher.detect() is not None:
        raise ConfigurationError(f"{_STUDY}: starts its own labs; run it without mpiexec")
    check_least(_STUDY, "--hosts", arguments.hosts)
    links = lab_jobs.read_networks(_STUDY, arguments.networks)
    lab_jobs.check_lab(_STUDY)
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for network in links:
        for task in read_list(arguments.task):
            rows = rows_of(folder, arguments, network, task)
            print(f"\n{task}, {arguments.hosts} hosts, {network}\n")
            print("\n".join(table(rows)), flush=True)
    return 0


def rows_of(folder: Path, arguments: argparse.Namespace, network: Network, task: str) -> list[dict[str, Any]]:
    """Return the rows of all exchanges that were asked for, in their order."""
    asked, alone = read_list(arguments.exchange), read_list(arguments.alone)
    in_turn = [name for name in asked if name not in alone]
    groups = [in_turn, *([name] for name in asked if name in alone)]
    rows = [row for names in groups if names for row in rows_of_job(folder, arguments, network, task, names)]
    return sorted(rows, key=lambda row: asked.index(row["exchange"]))


def rows_of_job(
    folder: Path, arguments: argparse.Namespace, network: Network, task: str, exchanges: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the rows of exchanges that share a job, from the folder or a lab; ``problem`` is None if all went well."""
    name = "-".join((task, str(arguments.hosts), str(network), "+".join(exchanges))).replace("/", "-").replace(":", "-")
    kept, log = folder / f"{name}.json", folder / f"{name}.log"
    words = ["bench", "training", "--task", task, "--exchange", ",".join(exchanges), "--ratio", str(arguments.ratio)]
    words += ["--steps", str(arguments.steps), "--blocks", str(_BLOCKS), "--warm-up", str(arguments.warm_up)]
    words += ["--every", str(arguments.every)]
    before = lab_jobs.read_json(kept)
    if before.get("words") == words:
        return list(before["rows"])
    print(f"# {name}", file=sys.stderr, flush=True)
    written = folder / f"{name}.rows"
    command = [
        *lab_jobs.lab_words(arguments.hosts, network),
        *lab_jobs.MPICOMP,
        *words,
        "--json",
        str(written.resolve()),
    ]
    status = lab_jobs.execute(command, os.environ, log, arguments.limit)
    if status == 0:
        in_turn = len(exchanges) > 1
        rows = [{**row, "problem": None, "in_turn": in_turn} for row in json.loads(written.read_text())["rows"]]
    else:
        end = f"no end within {arguments.limit:.0f} s" if status is None else f"ended with status {status}"
        last = thrown(log) or ("" if status is None else lab_jobs.last_words(log).removeprefix("mpicomp: "))
        rows = [{"exchange": name, "problem": f"{end}: {last}".removesuffix(": ")} for name in exchanges]
    kept.write_text(json.dumps({"words": words, "rows": rows}, indent=1) + "\n")
    return rows


def thrown(log: Path) -> str:
    """Return what the first exception of C++ in a job's log says; empty where there is none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition("what():")[2].strip() for line in lines if "what():" in line), "")


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table in Markdown, with quality next to seconds and bytes."""
    ddp = next((row["median_s"] for row in rows if row["exchange"] == "ddp" and row["problem"] is None), None)
    ran = [row for row in rows if row["problem"] is None]
    quality = ran[0]["quality_name"] if ran else "quality"
    lines = [
        f"| exchange | ms a step | of ddp | throughput | MB a step | compress, exchange, decode ms | {quality} |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["problem"] is not None:
            lines.append(f"| {row['exchange']} | {row['problem'].replace('|', '/')} | | | | | |")
            continue
        phases = ", ".join(f"{1e3 * seconds:.1f}" for seconds in (row["phases_s"] or {}).values())
        share = "" if ddp is None or not row["in_turn"] else f"{row['median_s'] / ddp:.2f}"
        left = "" if row["of_none"] is None else f"{row['of_none']:.2f}"
        link = "" if row["link_bytes"] is None else f"{row['link_bytes'] / 1e6:.3g}"
        ended = "ranks differ" if row["quality"] is None else f"{row['quality']:.3f}"
        lines.append(
            f"| {row['exchange']} | {1e3 * row['median_s']:.0f} | {share} | {left} | {link} | {phases} | {ended} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
