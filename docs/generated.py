"""What pages take from the code when they are built; conf.py puts it where a page has ``<!-- NAME -->``."""

import functools
import importlib
import inspect
import re
import types
import typing
from collections.abc import Mapping
from statistics import fmean

import msgspec
import numpy as np
from numpydoc.docscrape import NumpyDocString

from mpicomp.cli.list import compressor_entries
from mpicomp.collectives import bind, fitting
from mpicomp.compressors import compressor_class, get_compressor, list_compressors
from mpicomp.mpi.rounds import HOST, layout_groups
from mpicomp.registry import REGISTRIES

# Where classes are public under a shorter name than that of their module.
PACKAGES = {"compressor": "mpicomp", "collective": "mpicomp.collectives", "policy": "mpicomp.policies"}

NUMEL = 1 << 20  # elements of the array whose bytes the page on collectives has
SHAPE = (1024, 1024)
RANKS = (4, 16, 64)
A_HOST = 2  # ranks, where a collective makes something of that

_JSON = {int: "integer", float: "number", str: "string", bool: "boolean", dict: "object", type(None): "null"}


def fill(page: str) -> str:
    """Return a page with the parts that it asks for."""
    parts = {
        "compressors": compressor_table,
        "each compressor": lambda: "\n\n".join(map(compressor, built_in("compressor"))),
        "collectives": collective_table,
        "each collective": lambda: "\n\n".join(map(collective, built_in("collective"))),
        "policies": lambda: "\n\n".join(map(_autoclass, ["policy"] * len(built_in("policy")), built_in("policy"))),
        "other policies": lambda: other_policies(page),
        "sections of other policies": lambda: policy_sections(page),
    }

    def part(found: re.Match[str]) -> str:
        name, _, what = found[1].partition(": ")
        if name in ("measured", "end"):  # a study has written that part
            return found[0]
        return fields_table(what.split(", ")) if name == "fields" else parts[name]()

    return re.sub(r"^<!-- (.+?) -->$", part, page, flags=re.MULTILINE)


def built_in(kind: str) -> list[type]:
    """Return the built-in classes of a kind, in the order of their names."""
    importlib.import_module(PACKAGES[kind])
    return [cls for cls in REGISTRIES[kind].classes() if REGISTRIES[kind].plugin(cls.id) is None]


def public_name(kind: str, cls: type) -> str:
    """Return the dotted name under which a class is public."""
    short = hasattr(importlib.import_module(PACKAGES[kind]), cls.__name__)
    return f"{PACKAGES[kind] if short else cls.__module__}.{cls.__name__}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _autoclass(kind: str, cls: type) -> str:
    return f"```{{eval-rst}}\n.. autoclass:: {public_name(kind, cls)}\n```"


@functools.cache
def _entries() -> list[dict[str, typing.Any]]:
    return [entry for entry in compressor_entries() if entry["plugin"] is None]


def _feedback(entry: Mapping[str, typing.Any]) -> str:
    return "on" if entry["feedback"] else "off" if entry["contractive"] else "refused"


def _bytes(entry: Mapping[str, typing.Any]) -> str:
    return f"{entry['wire_bytes_per_element']:.3g}"


def compressor_table() -> str:
    """Return a row for every compressor, family by family."""
    head = ["compressor", "family", "bias", "feedback", "bytes for 4"]
    families = list(dict.fromkeys(entry["family"] for entry in _entries()))
    rows = [
        [f"[`{entry['name']}`](#{entry['name']})", entry["family"], entry["bias"], _feedback(entry), _bytes(entry)]
        for entry in sorted(_entries(), key=lambda entry: families.index(entry["family"]))
    ]
    return table(head, rows)


def compressor(cls: type) -> str:
    """Return the section of a compressor: what fits it, where it comes from, its parameters with their defaults."""
    [entry] = [entry for entry in _entries() if entry["name"] == cls.id]
    fits = ", ".join(f"[`{name}`](collectives.md#{name})" for name in entry["collectives"])
    return f"### {cls.id}\n\nPaper: {entry['paper']}.\n\nCarried by {fits}.\n\n{_autoclass('compressor', cls)}"


def _example(cls: type) -> str:
    """Return the compressor with which a collective's bytes are shown."""
    fit = [name for name in list_compressors() if cls.id in fitting(compressor_class(name))]
    return next((name for name in ("topk", "dense") if name in fit), fit[0])


def wire_bytes(collective: str, compressor: str, ranks: int) -> float:
    """Return the bytes that leave a rank for other hosts in an exchange of `NUMEL` float32, on the average.

    They are those of the rounds that a collective announces, which are those that it runs.
    """
    scheme = bind(get_compressor(compressor).bind(["w"], [NUMEL], [SHAPE], warm_up=False), collective)
    layout = [rank // A_HOST for rank in range(ranks)] if collective == "hierarchical" else list(range(ranks))
    late = 10**6  # a step after all that changes while training begins
    found = []
    for rank in range(ranks):
        group = layout_groups(layout, rank)[0]
        tasks = [task for task in scheme.rounds(NUMEL, np.dtype(np.float32), group, late) if not task.once]
        parts = [(task, group.part(task.group)) for task in tasks if task.group != HOST]
        found.append(sum(task.wire_bytes(part) for task, part in parts if part is not None))
    return fmean(found)


def collective_table() -> str:
    """Return a row for every collective, with what leaves a rank."""
    rows = []
    for cls in built_in("collective"):
        example = _example(cls)
        megabytes = [f"{wire_bytes(cls.id, example, ranks) / 1e6:.3g}" for ranks in RANKS]
        rows.append([f"[`{cls.id}`](#{cls.id})", cls.messages, f"`{example}`", *megabytes])
    return table(["collective", "carries", "here", *(f"{ranks} ranks" for ranks in RANKS)], rows)


def collective(cls: type) -> str:
    """Return the section of a collective."""
    fit = [name for name in list_compressors() if cls.id in fitting(compressor_class(name))]
    carries = ", ".join(f"[`{name}`](compressors.md#{name})" for name in fit if _is_ours(name))
    return f"### {cls.id}\n\nPaper: {cls.paper}.\n\nCarries {carries}.\n\n{_autoclass('collective', cls)}"


def _is_ours(name: str) -> bool:
    return REGISTRIES["compressor"].plugin(name) is None


def other_policies(page: str) -> str:
    """Return a row for every policy that a page's table does not have."""
    return "\n".join(
        f"| `{cls.id}` | {cls.__doc__.splitlines()[0]} | see {{py:class}}`{public_name('policy', cls)}` |"
        for cls in built_in("policy")
        if f"\n| `{cls.id}` |" not in page
    )


def policy_sections(page: str) -> str:
    """Return a section for every policy that a page has none of, with its settings."""
    found = []
    for cls in built_in("policy"):
        if f"\n## {cls.id}\n" not in page:
            settings = [(key, value) for key, value in cls().get_config().items() if key != "id"]
            rows = table(["setting", "default"], [[f"`{key}`", f"`{value!r}`"] for key, value in settings])
            first = cls.__doc__.splitlines()[0]
            found.append(f"## {cls.id}\n\n{first} See {{py:class}}`{public_name('policy', cls)}`.\n\n{rows}\n")
    return "\n".join(found)


def fields_table(names: list[str]) -> str:
    """Return the fields of classes, one after the other; what a later one says of a field stands for all.

    Parameters
    ----------
    names : list of str
        Dotted names. Of a TypedDict or Struct the meaning is in its annotations, of another class in its docstring.
    """
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        module, _, attribute = name.rpartition(".")
        found |= fields(getattr(importlib.import_module(module), attribute))
    rows = [[f"`{name}`", kind, meaning] for name, (kind, meaning) in found.items()]
    return table(["field", "type", "meaning"], rows)


def fields(cls: type) -> dict[str, tuple[str, str]]:
    """Return type and meaning of each field that a class is written with."""
    if typing.is_typeddict(cls) or issubclass(cls, msgspec.Struct):
        hints = typing.get_type_hints(cls, include_extras=True)
        return {name: (_kind(typing.get_args(hint)[0]), hint.__metadata__[0]) for name, hint in hints.items()}
    hints = typing.get_type_hints(cls)
    text = NumpyDocString(inspect.getdoc(cls) or "")
    found = {
        attribute.name: (_kind(hints[attribute.name]), _meaning(" ".join(line.strip() for line in attribute.desc)))
        for attribute in text["Attributes"]
    }
    for name, member in vars(cls).items():
        getter = getattr(member, "fget", None) or getattr(member, "func", None)  # of a property, cached or not
        if isinstance(member, property | functools.cached_property):
            meaning = (inspect.getdoc(getter) or "").split("\n\n")[0].replace("\n", " ")
            found[name] = (_kind(typing.get_type_hints(getter)["return"]), _meaning(meaning))
    return found


def _meaning(text: str) -> str:
    """Return what a docstring says of an attribute, as a cell of a table."""
    start = text[:2] if text[1:2].isupper() else text[:2].lower()  # MPI stays as it is
    return (start + text[2:]).rstrip(".").replace("``", "`").replace("None ", "null ")


def _kind(hint: typing.Any) -> str:
    """Return what a type becomes in JSON."""
    if isinstance(hint, types.UnionType):
        return " or ".join(map(_kind, typing.get_args(hint)))
    if hasattr(hint, "to_json"):
        return _kind(typing.get_type_hints(hint.to_json)["return"])
    if typing.get_origin(hint) is list:
        return f"list of {_kind(typing.get_args(hint)[0])}s"
    return _JSON.get(typing.get_origin(hint) or hint, "object")
