"""The functions of a compressor that one reads are those that run: when one of them raises, its rounds stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from decentral.compressors import Chain, Compressor, parse_compressor, parse_feedback
from decentral.compressors.base import Method
from decentral.compressors.chain import SparsifierBase
from decentral.optimizers import make_aggregation, presets
from decentral.optimizers.sparseloco import SparseLoCo
from decentral.parameters import schema_of
from decentral.replica.apply import outer_step
from decentral.replica.codec import Codec
from decentral.replica.replica import Replica
from decentral.wire.frames import Frame, FrameKind, Header, seal
from decentral.wire.keys import Signer
from decentral.wire.messages import FrameRef, Record
from tests.kit.tables import COMPRESSORS

SIGNERS = sorted((Signer(bytes([n] * 32)) for n in range(1, 4)), key=lambda signer: signer.peer)
PEERS = tuple(signer.peer for signer in SIGNERS)
SCHEMA = schema_of({"weight": torch.zeros(70, 64, requires_grad=True), "bias": torch.zeros(70, requires_grad=True)})
NUMEL, ZERO = SCHEMA.fragments[0].numel, bytes(32)
SENDING, RECEIVING = ("compress", "select"), ("decompress", "place")


class Reached(Exception):  # no error: the function was called
    pass


def reached(*given: object, **named: object) -> None:
    raise Reached


def functions(compressor: Compressor, words: Sequence[str]) -> list[tuple[type, str]]:
    """List what the contract names, and what each class says itself: ``compress_one`` beside ``compress``, say."""
    parts = [compressor]
    parts += [compressor.sparsifier, compressor.quantiser] if isinstance(compressor, Chain) else []
    found = [(type(part), words[0]) for part in parts if part is compressor or not isinstance(part, SparsifierBase)]
    found += [(type(part), words[1]) for part in parts if isinstance(part, SparsifierBase)]
    for part in parts:
        own = [base for base in type(part).__mro__ if base not in (Method, SparsifierBase)]
        of_a_chain = part is not compressor and isinstance(part, SparsifierBase)
        for name in [f"{words[1]}_one"] if of_a_chain else [f"{word}_one" for word in words]:
            found += [(base, name) for base in own[:1] if name in vars(base)]
    return found


def replica_of(compressor: Compressor, rule: str = "mean") -> Replica:
    codec = Codec(compressor)
    return Replica(SCHEMA, [torch.zeros(NUMEL)], SparseLoCo(), codec, codec, rule=make_aggregation(rule, {}))


def change(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def round_of(codec: Codec) -> tuple[Record, dict[bytes, Frame]]:
    frames, refs = {}, []
    for n, signer in enumerate(SIGNERS):
        header = Header(FrameKind.CONTRIBUTION, ZERO, 0, 1, 0, 0, 1, 0, ZERO, signer.peer, 30, 30)
        frame = seal(header, codec.encode(change(n), {}, codec.cut(SCHEMA.fragments[0])).body, signer)
        frames[frame.hash] = frame
        refs.append(FrameRef(signer.peer, frame.hash, 0, 30, 30, 0, b""))
    return Record(ZERO, 0, 1, 0, 0, 0, ZERO, ZERO, PEERS, tuple(refs), (), (), PEERS, False), frames


def stops(monkeypatch: pytest.MonkeyPatch, function: tuple[type, str], work: Callable[[], object]) -> bool:
    with monkeypatch.context() as patched:
        patched.setattr(*function, reached)
        try:
            work()
        except Reached:
            return True
        return False


NAMED = tuple(dict.fromkeys([*COMPRESSORS, *(preset.compressor for preset in presets().values())]))
every_one = pytest.mark.parametrize("spelling", NAMED)


@every_one
@pytest.mark.parametrize("feedback", ["none", "ef(beta=0.95)", "ef21"])
def test_no_contribution_is_made_without_what_one_reads(
    spelling: str, feedback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = Codec(parse_compressor(spelling), parse_feedback(feedback))
    encode = lambda: codec.encode(change(0), {}, codec.cut(SCHEMA.fragments[0]))  # noqa: E731
    encode()
    found = functions(codec.compressor, SENDING)
    assert {one: stops(monkeypatch, one, encode) for one in found} == dict.fromkeys(found, True)
    assert found


@every_one
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept since it came", "read again"])
@pytest.mark.parametrize("rule", ["mean", "krum"])
def test_no_round_is_committed_without_what_one_reads(
    spelling: str, is_kept: bool, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressor = parse_compressor(spelling)
    record, frames = round_of(Codec(compressor))

    def commit() -> None:
        replica = replica_of(compressor, rule)
        for frame in frames.values() if is_kept else ():
            shapes = replica.codec.cut(SCHEMA.fragments[0])
            assert replica.contents.unpacked.add(frame, replica.codec.unpack(frame.body, shapes))
        outer_step(replica, record, frames)

    commit()
    found = functions(compressor, RECEIVING)
    assert {one: stops(monkeypatch, one, commit) for one in found} == dict.fromkeys(found, True)
    assert found
