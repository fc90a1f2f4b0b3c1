"""Nothing that others' scripts rely on has gone: see collect.py."""

import json
from pathlib import Path

import pytest
from contract import collect

BEFORE = json.loads(Path(__file__).with_name("contract.json").read_text())


OVERWRITTEN = {"Context": ["rank"]}  # whatever was given was the group's


@pytest.mark.filterwarnings("ignore:.* has moved:DeprecationWarning")
@pytest.mark.parametrize("module", BEFORE["names"])
def test_public_names_and_their_parameters(module):
    now = collect.signatures(module, BEFORE["names"][module])
    before = {name: set(own) - set(OVERWRITTEN.get(name, [])) for name, own in BEFORE["names"][module].items()}
    gone = {name: sorted(own - set(now[name])) for name, own in before.items()}
    assert {name: own for name, own in gone.items() if own} == {}


@pytest.mark.filterwarnings("ignore:.* has moved:DeprecationWarning")
def test_names_in_the_docs():
    assert [name for name in BEFORE["documented"] if not collect.exists(name)] == []


def test_flags():
    now = collect.flags()
    gone = {name: sorted(set(own) - set(now.get(name, []))) for name, own in BEFORE["flags"].items()}
    assert {name: own for name, own in gone.items() if own} == {}


@pytest.mark.slow
def test_fields():
    now = collect.outputs()
    gone = {name: sorted(set(own) - set(now.get(name, []))) for name, own in BEFORE["fields"].items()}
    assert {name: own for name, own in gone.items() if own} == {}
