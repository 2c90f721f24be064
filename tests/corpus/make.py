"""Write the corpus: hostile bytes, one small file each, and a table of what each must end in.

    python -m tests.corpus.make

The same files every time: a test compares them with what is checked in. ``corpus.toml`` names for every target the
files that go through it, and the words of the error that each must end in; ``accepted`` for the legal ones, which
stand at the edge of what is refused. A bug becomes an entry: see ``documents._found``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.corpus.bodies import bodies
from tests.corpus.controls import controls
from tests.corpus.documents import documents
from tests.corpus.frames import frames
from tests.corpus.groups import groups
from tests.corpus.packed import packed
from tests.corpus.streams import streams
from tests.kit.builders import ACCEPTED, Entry

__all__ = ["ACCEPTED", "FOLDER", "entries", "path_of", "table"]

FOLDER = Path(__file__).parent


SKIPPED = {
    "section count, order, repeated; unknown tensor id; dtype 255": "a body has no sections: the layout names them",
    "k = 0, k above its maximum, index as a negative u32": "k is never sent; an index has no sign and at most 12 bits",
    "codebook not finite, unsorted, of a wrong length": "no method sends a codebook",
    "norm at the cap and above it, finite values with an infinite sum": "norms are the aggregation's to bound",
    "weight 0, -1, 2**63": "weights are not sent; steps and tokens at their ends are in `frame`",
    "other base hash": "the round machine compares bases; a frame alone is well formed",
    "length 2**64 - 1": "lengths are u32, and 2**32 - 1 is here",
}


def entries() -> list[Entry]:
    """Every file, its target and its words."""
    makers = (frames, streams, bodies, packed, controls, groups, documents)
    return [entry for maker in makers for entry in maker()]


def slug(text: str) -> str:
    """A name as a folder's."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def path_of(target: str, name: str) -> str:
    """Where a file lies, below this folder."""
    return f"{slug(target)}/{slug(name)}.bin"


def table() -> str:
    """``corpus.toml``."""
    lines = ["# Made by make.py: target -> file -> words of the error it must end in.", "", "[skipped]"]
    lines += [f"{json.dumps(what)} = {json.dumps(why)}" for what, why in SKIPPED.items()]
    target = None
    for entry in sorted(entries()):
        if entry[0] != target:
            target = entry[0]
            lines += ["", f"[{json.dumps(target)}]"]
        lines.append(f"{json.dumps(path_of(target, entry[1]))} = {json.dumps(entry[3], ensure_ascii=True)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write everything; files of names that are gone are removed."""
    wanted = {FOLDER / path_of(target, name): data for target, name, data, _ in entries()}
    for path in FOLDER.glob("*/*.bin"):
        if path not in wanted:
            path.unlink()
    for path, data in wanted.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    (FOLDER / "corpus.toml").write_text(table(), encoding="ascii")
    print(f"{len(wanted)} files, {sum(map(len, wanted.values()))} bytes")


if __name__ == "__main__":
    main()
