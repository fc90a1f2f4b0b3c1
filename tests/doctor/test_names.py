import threading

from doctor.ranks import rank

from mpicomp.doctor import names


def test_names_that_resolve_and_one_that_cannot():
    assert names.resolves("localhost")
    assert not names.resolves("no-such-node.invalid")  # a name that is promised to have no address


def test_a_resolver_that_does_not_answer_is_not_waited_for(monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(names, "_LIMIT_S", 0.05)
    monkeypatch.setattr(names.socket, "getaddrinfo", lambda *_: answer.wait(100) and ["too late"])
    assert not names.resolves("slow")
    answer.set()


def test_each_name_is_noted_once():
    ranks = [rank(0, unresolved=("n1", "n2")), rank(1, leader=1, host="b", unresolved=("n2",))]
    assert [note.what.split(":")[0] for note in names.name_notes(ranks)] == [
        "the node name n1 does not resolve on a",
        "the node name n2 does not resolve on a",
    ]
    assert names.name_notes([rank(0)]) == []
