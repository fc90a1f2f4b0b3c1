"""A report, written out for people."""

from __future__ import annotations

import itertools
from typing import Any

from mpicomp.job import plural

Line = tuple[str, str]


def render(report: dict[str, Any]) -> str:
    """Format the report of `examine` as text."""
    mpi, python = report["mpi"], report["python"]
    lines: list[Line] = []
    if mpi is not None:
        lines.append(("MPI", f"{mpi['vendor']}, MPI {mpi['standard']}, thread level {mpi['thread_level']}"))
        lines.append(("", mpi["version"]))
        lines.append(("library", f"{mpi['library'] or 'unknown'} ({mpi['origin'] or 'unknown'})"))
    launch = report["launcher"]
    lines.append(("launcher", f"{launch['name']}, {launch['size']} processes" if launch else "none"))
    if mpi is not None:
        lines += _places(report) + _network(report)
    lines.append(("Python", f"{python['version']}, {python['executable']}"))
    for name, version in report["packages"].items():
        lines.append((name, version or "not installed"))
    text = [f"{name:<11} {value}" for name, value in lines]
    for title, entries in (("note", report["notes"]), ("problem", report["problems"])):
        for entry in entries:
            text += ["", f"{title}: {entry['what']}", f"    fix: {entry['fix']}"]
    text += ["", "" if report["problems"] else "no problem found"]
    return "\n".join(text).rstrip()


def _places(report: dict[str, Any]) -> list[Line]:
    lines = [("ranks", str(report["ranks"]))]
    for number, host in enumerate(report["hosts"]):
        lines.append(
            ("" if number else "hosts", f"{host['name']}: {plural(len(host['ranks']), 'rank')}, "
             f"{plural(host['cores'], 'core')}")
        )  # fmt: skip
    # Successive ranks with the same binding share a line.
    bindings = itertools.groupby(report["binding"], key=lambda one: (one["host"], one["cpus"], one["threads"]))
    for number, ((host, cpus, threads), group) in enumerate(bindings):
        first, *others = [one["rank"] for one in group]
        who = f"rank {first}" if not others else f"ranks {first}-{others[-1]}"
        lines.append(("" if number else "binding", f"{who}: cpus {cpus} of {host}, {plural(threads, 'thread')} each"))
    if set(report["gpus"]) <= {"none"}:
        lines.append(("GPUs", "none"))
    else:
        for rank, gpu in enumerate(report["gpus"]):
            lines.append(("" if rank else "GPUs", f"rank {rank}: {gpu}"))
    return lines


def _network(report: dict[str, Any]) -> list[Line]:
    aware, wires, link, clocks = (report[name] for name in ("cuda_aware", "transports", "link", "clocks"))
    verdict = "yes" if aware["value"] else "no, messages from a GPU go through the host"
    lines = [("CUDA-aware", f"{verdict} ({aware['reason']})")]
    lines.append(
        ("transports", f"{wires['inside']} inside a host, {wires['between']} between hosts ({wires['reason']})")
    )
    if link is not None:
        speed = f"{_three(link['latency_s'] * 1e6)} us, {_three(link['bytes_per_s'] / 1e6)} MB/s"
        lines.append(("link", f"{speed} between {link['between']}, measured with all ranks sending"))
    if clocks is not None and len(report["hosts"]) > 1:
        lines.append(
            ("clocks", f"compared to {_three(clocks['error_s'] * 1e6)} us; wall clocks differ by "
             f"{_three(clocks['wall_difference_s'])} s")
        )  # fmt: skip
    fork = report["fork"]
    verdict = "dangerous" if fork["dangerous"] else "not dangerous"
    lines.append(("fork", f"{verdict} with live MPI ({fork['reason']})"))
    return lines


def _three(number: float) -> str:
    return f"{float(f'{number:.3g}'):g}"
