"""The fuzzers' small brothers: every target under changed files of its corpus, and some hundred mutated frames."""

import contextlib
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decentral.coding import Rising
from decentral.compressors import Decoded, Payload, Uncompressed, base
from decentral.errors import PayloadError
from decentral.replica.codec import Codec
from tests.corpus.make import entries
from tests.fuzz.mutants import Count, Crash, mutant, run, seeds
from tests.fuzz.targets import SHAPES, TARGETS, read_body, spellings

CORPUS: dict[str, list[bytes]] = {}
for target, _, data, _ in entries():
    if len(data) < 5000:
        CORPUS.setdefault(target, []).append(data)


@st.composite
def changed(draw: st.DrawFn, samples: list[bytes]) -> bytes:
    """A file of the corpus with bytes overwritten, cut out or put in; or any bytes."""
    data = bytearray(draw(st.sampled_from(samples) | st.binary(max_size=80)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        stop = min(len(data), at + draw(st.integers(0, 8)))
        data[at:stop] = draw(st.binary(max_size=8))
    return bytes(data)


# Frames of every compressor are in the next test, too.
MORE = [target.name for target in TARGETS.values() if target.name.startswith(("frame ", "bodies "))]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in MORE)) for name in TARGETS])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_changed_bytes_are_read_or_refused_in_one_way(name: str, data: st.DataObject) -> None:
    samples = CORPUS.get(name) or CORPUS["frame"]
    changed_bytes = data.draw(changed(samples))
    with contextlib.suppress(TARGETS[name].refusal):
        TARGETS[name].read(changed_bytes)


@pytest.mark.parametrize("spelling", spellings())
def test_mutated_frames_are_read_or_refused(spelling: str) -> None:
    count = Count()
    run(spelling, 200, "test", count)
    assert count.frames == 200
    assert count.accepted >= 5
    assert count.behind_the_signature >= 30


def test_one_seed_gives_the_same_mutants() -> None:
    def some() -> list[bytes]:
        rng = random.Random(7)
        found = seeds("int8(block=8)", rng)
        return [mutant(rng.choice(found), found, rng) for _ in range(50)]

    assert some() == some()


def test_a_decoder_without_its_check_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(rule_holds: torch.Tensor | bool, method: object, rule: str) -> None:
        if not bool(rule_holds):
            raise ValueError("as if it were not checked")

    monkeypatch.setattr(base, "require", unchecked)
    with pytest.raises(Crash, match="as if it were not checked") as caught:
        run("none", 2000, "planted", Count())
    assert caught.value.data[:4] == b"DCFR"


def test_an_unchecked_index_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rising, "_refusal", lambda self: IndexError("as if it were not checked"))
    with pytest.raises(Crash, match="as if it were not checked"):
        run("topk(k=3, chunk=64)", 2000, "planted", Count())


def test_what_is_added_in_part_is_caught() -> None:
    class TooLate(Decoded):
        def tensor(self) -> torch.Tensor:
            raise PayloadError("refused")

        def add(self, start: int, total_n: torch.Tensor, weight: float) -> None:
            total_n += 1
            raise PayloadError("too late")

    class Hasty(Uncompressed):
        def decompress(self, payloads: Sequence[Payload]) -> list[Decoded]:
            return [TooLate() for _ in payloads]

    with pytest.raises(AssertionError, match="in part"):
        read_body(Codec(Hasty()), SHAPES[0], bytes(4) + b"\xff" * (4 * 144))


def test_a_crash_is_a_file_for_the_corpus(tmp_path: Path) -> None:
    path = Crash("frame none", b"bytes", "ValueError()").save(tmp_path / "crashes")
    assert path.read_bytes() == b"bytes"
    assert "frame none" in path.with_suffix(".txt").read_text()
