"""Change one thing at a time in the source and count the changes that no test notices.

    python tests/mutants.py [--count 60] [--seed 0] [--folders mpicomp/reducer,kernels/cpu] [--list]

A mutant swaps a comparison or an operator, moves a constant by one, or negates a condition. It is
written into the file, tests run until one fails, and the file is restored: run it in a clone whose files are committed.
First the tests of the same folder run, then the serial suite, then the parallel tests at 2 ranks.
"""

import argparse
import ast
import copy
import random
import subprocess
import sys

import run

FOLDERS = "mpicomp/reducer,mpicomp/collectives,mpicomp/compressors,mpicomp/policies,mpicomp/mpi,kernels/cpu"
SWAPS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.FloorDiv: ast.Mult,
}
LIMIT_S = 1800


def changes(tree):
    """Yield (node, text that replaces it), in the same order for the same source."""
    for node in ast.walk(tree):
        new = copy.deepcopy(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
            new.ops = [SWAPS[type(node.ops[0])]()]
        elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPS:
            new.op = SWAPS[type(node.op)]()
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            new.value += 1
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            node, new = node.test, ast.UnaryOp(ast.Not(), node.test)
        else:
            continue
        text = ast.unparse(new)
        yield node, f"({text})" if isinstance(node, ast.expr) else text


def mutants(folders, count, seed):
    """Return ``count`` (path, number of the place in it), drawn from all places of the folders."""
    files = [path for folder in folders for path in sorted((run.ROOT / folder).rglob("*.py"))]
    every = [(path, number) for path in files for number, _ in enumerate(changes(ast.parse(path.read_text())))]
    return random.Random(seed).sample(every, count)


def mutated(source, number):
    """Return the changed source, and what was changed."""
    node, text = list(changes(ast.parse(source)))[number]
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:line])) for line in range(len(lines))]
    begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    changed = (source.encode()[:begin] + text.encode() + source.encode()[end:]).decode()
    return changed, f"line {node.lineno}: {ast.unparse(node)[:60]!r} -> {text[:60]!r}"


def killed_by(path):
    """Return the name of the first run of tests that fails, None if all pass."""
    folder = run.ROOT / "tests" / path.relative_to(run.ROOT).parts[1]
    folder = folder if folder.exists() else run.ROOT / "tests" / "kernels"
    serial = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not mpi"]
    runs = {
        "tests of its folder": [*serial, str(folder)],
        "serial suite": [*serial, *run.SIDE_BY_SIDE, "tests"],
        "parallel tests": [sys.executable, "tests/run.py", "--only", "parallel", "--ranks", "2"],
    }
    for name, command in runs.items():
        with open("/dev/null", "w") as nowhere:
            if run.run(command, LIMIT_S, run.ALONE, nowhere) != 0:
                return name
    return None


def main():
    """Run what was asked for; return the number of mutants that live."""
    parser = argparse.ArgumentParser(description="Count the changes of the source that no test notices.")
    parser.add_argument("--count", type=int, default=60, help="how many changes")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--folders", default=FOLDERS, help="where to draw from, with commas")
    parser.add_argument("--list", action="store_true", help="show the changes and run nothing")
    arguments = parser.parse_args()
    if not arguments.list and subprocess.run(["git", "diff", "--quiet"], cwd=run.ROOT, check=False).returncode:
        parser.error("there are changes that are not committed")
    alive = []
    for path, number in mutants(arguments.folders.split(","), arguments.count, arguments.seed):
        source = path.read_text()
        changed, text = mutated(source, number)
        name = f"{path.relative_to(run.ROOT)} {text}"
        if arguments.list:
            print(name)
            continue
        try:
            path.write_text(changed)
            killer = killed_by(path)
        finally:
            path.write_text(source)
        print(f"{'alive' if killer is None else 'killed by ' + killer}: {name}", flush=True)
        alive += [name] * (killer is None)
    if not arguments.list:
        print(f"{arguments.count - len(alive)} killed, {len(alive)} alive")
    return len(alive)


if __name__ == "__main__":
    sys.exit(main() > 0)
