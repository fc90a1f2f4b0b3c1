"""docs/policies.md: its code runs, its tables have every setting, and its example keeps the laws."""

import json
import re
import runpy
import sys

import pytest
from tables import DOCS, FILL
from worlds import Ranks

import mpicomp
from mpicomp.errors import ConfigurationError, UnknownNameError
from mpicomp.policies import list_policies, policy_class

PAGE = (DOCS / "policies.md").read_text()
OURS = [name for name in list_policies() if policy_class(name).__module__.startswith("mpicomp.policies")]


@pytest.fixture(autouse=True)
def _among_the_examples(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "examples")
    for path in (DOCS / "examples").glob("*.py"):  # what an earlier test has registered may be forgotten by now
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


@pytest.mark.parametrize("name", OURS)
def test_policy_has_a_section_with_its_settings(name):
    page = FILL(PAGE)
    sections = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    text = sections[sections.index(name) + 1]
    written = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", text, flags=re.MULTILINE))
    config = policy_class(name)().get_config()
    assert written == {key: repr(value) for key, value in config.items() if key != "id"}
    assert f"\n| `{name}` | " in page  # which one to take


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
