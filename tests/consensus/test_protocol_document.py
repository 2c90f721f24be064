"""docs/protocol.md against the code: every message, stream and constant that it names, and none left out."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from dataclasses import fields
from pathlib import Path

import decentral.rounds
from decentral.dissemination import broadcast, text
from decentral.redundancy import keeper
from decentral.rounds import frame_io, gossip, partners, snapshots
from decentral.swarm import admission, contacts, hello
from decentral.wire import groups, messages
from decentral.wire.frames import HEADER_NBYTES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
GOLDEN = ROOT / "tests/golden"
ALSO = (
    "decentral.transport.requests",
    "decentral.dissemination.broadcast",
    "decentral.dissemination.pull",
    "decentral.dissemination.spread",
    "decentral.dissemination.text",
    "decentral.wire.pieces",
    "decentral.redundancy.pieces",
    "decentral.redundancy.keeper",
    "decentral.redundancy.giver",
    "decentral.redundancy.recovery",
)


def rows(pattern: str) -> list[tuple[str, ...]]:
    return re.findall(pattern, PAGE, flags=re.MULTILINE)


def test_every_message_is_there_with_its_number_its_fields_and_its_size() -> None:
    found = rows(r"^\| (\d+) \| `(\w+)` \| ([^|]+) \| ([^|]+) \|$")
    assert {int(number): name for number, name, *_ in found} == {n: t.__name__ for n, t in messages._TYPES.items()}
    for number, name, listed, size in found:
        wanted = ", ".join(field.name for field in fields(messages._TYPES[int(number)])) or "none"
        assert listed == wanted
        if size.isdigit():
            golden = re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower() + ".hex"
            assert int(size) == len(bytes.fromhex((GOLDEN / golden).read_text(encoding="ascii")))


def test_every_stream_is_there() -> None:
    streams = {
        frame_io.CONTROL,
        broadcast.PUSH,
        broadcast.FETCH,
        broadcast.PIECE,
        snapshots.CHAIN,
        snapshots.OLDEST,
        snapshots.INDEX,
        snapshots.STATE,
        snapshots.PACKED,
        gossip.PAIR,
        partners.LANE,
        hello.HELLO,
    }
    streams |= {keeper.KEEP, keeper.KEPT, text.TEXT}
    streams |= {groups.GROUP, groups.BOUNDARY}
    streams |= {contacts.LEASE, contacts.LEASES, admission.ADMISSION}
    assert set(re.findall(r"`(/decentral/[a-z]+/\d+)`", PAGE)) == streams
    assert f"{HEADER_NBYTES} bytes of signed header" in PAGE


def test_every_kind_of_body_between_stages_is_there() -> None:
    found = rows(r"^\| `([A-Z]+)` \| (\d) \| (?:a stage|the first|each), [^|]+ \| [^|]+ \|$")
    assert {name: int(kind) for name, kind in found} == {kind.name: kind.value for kind in groups.BodyKind}


def test_every_constant_named_has_the_value_that_the_code_has() -> None:
    found = rows(r"^\| `(decentral[\w.]+)\.([A-Z_]+)` \| ([\d.]+) \|")
    assert len(found) > 30
    for module, name, value in found:
        assert float(value) == getattr(importlib.import_module(module), name), f"{module}.{name}"


def test_no_constant_of_the_protocol_is_left_out() -> None:
    found = pkgutil.walk_packages(decentral.rounds.__path__, "decentral.rounds.")
    modules = [info.name for info in found if not info.ispkg]
    defined = {f"{module}.{name}" for module in (*modules, *ALSO) for name in numbers_in(module)}
    named = {f"{module}.{name}" for module, name in rows(r"^\| `(decentral[\w.]+)\.([A-Z_]+)` \|")}
    assert defined - named == set()


def numbers_in(module: str) -> list[str]:
    """Public numeric constants that a module defines, rather than imports."""
    path = ROOT / (module.replace(".", "/") + ".py")
    made = [
        node.targets[0] for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)
    ]
    names = [target.id for target in made if isinstance(target, ast.Name) and re.fullmatch(r"[A-Z][A-Z_]*", target.id)]
    return [name for name in names if isinstance(getattr(importlib.import_module(module), name), int | float)]
