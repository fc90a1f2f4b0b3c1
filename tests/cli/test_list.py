"""``mpicomp list``: the registered names and their properties."""

import json

import pytest

import mpicomp
from mpicomp.cli import main
from mpicomp.collectives import bind
from mpicomp.compressors import compressor_class
from mpicomp.errors import ConfigurationError
from mpicomp.mpi import LocalWorld

OURS = [name for name in mpicomp.list_compressors() if compressor_class(name).__module__.startswith("mpicomp.")]


@pytest.fixture
def written(capsys):
    assert main(["list", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_of_compressors_is_what_they_do(written):
    entries = {entry["name"]: entry for entry in written["compressors"]}
    assert set(OURS) <= set(entries)
    for name, entry in entries.items():
        compressor = mpicomp.get_compressor({"id": name} | entry["parameters"])
        assert compressor.feedback == entry["feedback"]
        assert entry["wire_bytes_per_element"] == compressor.wire_bytes_per_element(4) > 0
        assert entry["paper"] == type(compressor).paper != ""
        assert type(compressor).__name__ == entry["class"]
        for collective in entry["collectives"]:
            bind(compressor, collective)
        world = LocalWorld(1)
        if entry["contractive"]:
            assert mpicomp.Reducer(compressor, feedback=True, comm=world.transports[0]).feedback
        else:
            with pytest.raises(ConfigurationError, match="not contractive"):
                mpicomp.Reducer(compressor, feedback=True, comm=world.transports[0])
    of = {name: (entry["family"], entry["bias"], entry["message"]) for name, entry in entries.items()}
    assert of["dense"] == ("dense", "exact", "dense")
    assert of["topk"] == ("sparsifier", "biased", "sparse")
    assert of["onebit"] == ("quantiser", "biased", "packed")
    assert of["powersgd"] == ("low rank", "biased", "own")


def test_json_has_all_collectives_and_policies(written):
    assert [entry["name"] for entry in written["collectives"]] == mpicomp.list_collectives()
    assert [entry["name"] for entry in written["policies"]] == mpicomp.list_policies()
    for entry in written["collectives"]:
        assert entry["compressors"]
        assert entry["paper"]


def test_text_has_the_configuration_of_the_paper(written, capsys):
    published = [
        entry["name"] for part in ("compressors", "policies") for entry in written[part] if entry.get("as_published")
    ]
    assert {"sidco", "gravac", "lgreco", "lgc"} <= set(published)
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    for name in published:
        config = {"id": name, "as_published": True}
        assert f"with the paper's settings: {json.dumps(config)}" in printed
        (mpicomp.get_policy if name in mpicomp.list_policies() else mpicomp.get_compressor)(config)


def test_without_torch_all_is_listed(written, monkeypatch, capsys):
    monkeypatch.setattr("mpicomp.systems.lgc.compressor.find_spec", lambda name: None)
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["compressors"] == written["compressors"]
    unknown = [entry["name"] for entry in listed["collectives"] if entry["memory"] is None]
    assert unknown == ["learned"]
    assert main(["list"]) == 0
