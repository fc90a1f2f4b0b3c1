"""What the README shows runs as it stands."""

import re
from pathlib import Path

import pytest
from marks import slow

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
[TURNED_OVER] = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)

TRAINING = """
import torch
torch.manual_seed(0)
ToyModel = lambda: torch.nn.Linear(3, 2)
my_share_of_the_data = [(torch.ones(4, 3), torch.zeros(4, 2))] * 3
"""


def test_it_opens_with_two_commands_that_need_only_python_and_pip():
    first, second = COMMANDS[:2]
    for command in (first, second):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e '.[mpich,")
        assert command.count("\n") == 1
    assert "mpicomp train" in first
    assert "tests/run.py" in second


@pytest.mark.parametrize("ranks", [slow(1), 2])
def test_three_lines_in_a_pytorch_script(mpiexec, tmp_path, ranks):
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    after = "".join(line[1:] for line in TURNED_OVER.splitlines(keepends=True))
    script.write_text(TRAINING + after + "\nassert optimizer.reducer.last_step.step == 2\n")
    done = mpiexec(ranks, script, timeout=60)
    assert done.returncode == 0, done.stderr
