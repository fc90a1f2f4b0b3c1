"""What scripts of users rely on is what contract.txt lists: see collect.py."""

import pytest
from contract import collect

LISTED = collect.CONTRACT.read_text().splitlines()
ADVICE = "python tests/contract/collect.py writes contract.txt; a name that goes breaks scripts of users"


@pytest.mark.parametrize("part", ["names", "flags"])
def test_contract_names_and_flags_are_those_listed(part):
    kinds = ("names ", "parameters ") if part == "names" else ("flags ",)
    assert list(getattr(collect, part)()) == [line for line in LISTED if line.startswith(kinds)], ADVICE


@pytest.mark.slow
def test_contract_fields_listed_are_written():
    written = {line.split()[1]: set(line.split()[2:]) for line in collect.fields()}
    listed = {line.split()[1]: set(line.split()[2:]) for line in LISTED if line.startswith("fields ")}
    gone = {path: sorted(keys - written.get(path, set())) for path, keys in listed.items()}
    assert {path: keys for path, keys in gone.items() if keys} == {}, ADVICE
