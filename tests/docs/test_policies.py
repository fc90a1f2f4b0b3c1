"""docs/policies.md: its code runs, its tables have every setting, and its example keeps the laws."""

import json
import re
import runpy
import sys

import pytest
from tables import DOCS
from worlds import Ranks

import mpicomp
from mpicomp.errors import ConfigurationError, UnknownNameError

PAGE = (DOCS / "policies.md").read_text()


@pytest.fixture(autouse=True)
def _among_the_examples(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "examples")
    for path in (DOCS / "examples").glob("*.py"):  # what an earlier test has registered may be forgotten by now
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


@pytest.mark.slow
def test_blocks_of_the_page_run(mpiexec, tmp_path):
    script = tmp_path / "script.py"
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    check = "\nimport json\nif reducer.transport.group.rank == 0:\n"
    check += "    print(json.dumps([bucket.collective, reducer.policy.get_config()]))\n"
    script.write_text("\n".join(blocks) + check)
    done = mpiexec(2, script, timeout=100)
    assert done.returncode == 0, done.stderr
    collective, config = json.loads(done.stdout)
    assert collective in mpicomp.list_collectives() or ":" in collective
    assert config["id"] == "flexible"  # the last block


def test_policy_of_the_page_has_reasons_and_settings(capsys):
    runpy.run_path(str(DOCS / "examples" / "use_flush.py"))
    reasons = capsys.readouterr().out.splitlines()
    assert [reason.split(";")[0] for reason in reasons] == [
        "flush: 0 steps after a flush",
        "flush: 1 steps after a flush",
        "flush: flush",
    ]
    with pytest.raises(ConfigurationError, match="flush: every must be at least 1, got 0"):
        mpicomp.Reducer("topk", policy={"id": "flush", "every": 0}, comm=Ranks(1).world.transports[0])
    with pytest.raises(UnknownNameError, match="did you mean 'every'"):
        mpicomp.Reducer("topk", policy={"id": "flush", "evry": 3}, comm=Ranks(1).world.transports[0])
