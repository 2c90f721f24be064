"""Everything that reads a stranger's bytes, as a table: a name, a function of bytes, the one error it may raise.

The corpus, the hypothesis tests and the fuzzers all go through this table. Functions return what they read, after
checking what must hold of it: that it is finite and of the right size, and that it is written again as it was read.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import ipaddress
import json
import math
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from decentral import coding
from decentral.coding import Floats, Form, Rising, Symbols
from decentral.compressors import describe_compressors, parse_compressor
from decentral.consensus.chain import Head
from decentral.consensus.paxos import Acceptor
from decentral.dissemination.reassembly import Reassembly
from decentral.errors import ConfigError, DiskError, InviteError, PayloadError, VersionError
from decentral.manifest import parse_manifest
from decentral.manifest.presets import check_methods
from decentral.parameters import Fragment, ParameterSpec, Schema
from decentral.pipeline.lines import Forms, StageInbox, ThreadBell
from decentral.pipeline.stage import Done
from decentral.redundancy import pieces
from decentral.redundancy.pieces import Label
from decentral.replica.codec import Codec, Shapes, numel
from decentral.rounds.catch_up import split_commits, split_oldest
from decentral.rounds.frame_io import Inbox
from decentral.state.checkpoint import META, TENSORS, read_checkpoint, unflatten
from decentral.state.export import unpack_file
from decentral.state.journal import HEAD_NBYTES, Journal
from decentral.state.snapshot import (
    BY_PLANES,
    CHUNK_NBYTES,
    Assembler,
    Layout,
    SnapshotIndex,
    chunk_hash,
    from_form,
    to_form,
)
from decentral.state.tensor_file import DamagedFile, read_tensor_file
from decentral.swarm.announcement import MOST_ADDRESSES, local_addresses, read_announcement, write_announcement
from decentral.swarm.hello import Hello
from decentral.swarm.invite import Invite
from decentral.swarm.leases import read_lease, read_leases
from decentral.swarm.words import PROOF_NBYTES, WordsHandshake, parse_code
from decentral.transport import holepunch, paths
from decentral.transport.native.tcp import endpoint
from decentral.transport.protocols.circuit import Refused, read_question
from decentral.transport.protocols.messages import (
    LONGEST_MULTIADDR,
    multiaddr_to_bytes,
    multiaddr_to_text,
    read_varint,
    varint,
)
from decentral.wire import messages
from decentral.wire.codecs import from_bytes, to_bytes
from decentral.wire.frames import HEADER_NBYTES, Frame, parse
from decentral.wire.groups import Body, BodyKind, GroupRecord, Offered, Sealed
from decentral.wire.keys import SIGNATURE_NBYTES, Signer, is_sound
from decentral.wire.pieces import read_piece, read_want

# ---- a small run: three peers, two fragments, one plan ----

SIGNERS = tuple(sorted((Signer(bytes([n] * 32)) for n in (1, 2, 3)), key=lambda signer: signer.peer))
PEERS = tuple(signer.peer for signer in SIGNERS)
RUN, ANCHOR, HASH = (bytes([n] * 32) for n in (0xAA, 0xBB, 0xCC))
HEAD = Head(RUN, 1, 16, 16, HASH, ANCHOR, PEERS)
ROUND, PLAN = 17, 65536
SHAPES = (((12, 12),), ((5,), (3, 4), ()))  # of the two fragments
SCHEMA = Schema(
    tuple(
        Fragment(f, tuple(ParameterSpec(f"p{i}", shape) for i, shape in enumerate(shapes)))
        for f, shapes in enumerate(SHAPES)
    )
)
PARTITION = ((PEERS[0], 0, 100), (PEERS[1], 100, 144))
REFS = tuple(messages.FrameRef(peer, bytes([n] * 32), 0, 30, 15360) for n, peer in enumerate(PEERS[:2]))
THE_PLAN = messages.ReducePlan(1, ROUND, 1, PLAN, REFS, PARTITION)

_SMALL = [
    "none",
    "fp16",
    "bf16",
    "int8(block=8)",
    "e3m0(block=8)",
    "signmag2",
    "topk(k=3, chunk=64)",
    "topk(k=3, chunk=64) >> signmag2",
    "topk(k=3, chunk=64) >> int8(block=8)",
    "topk(k=3, chunk=64) >> e3m0(block=8)",
    "topk(k=3, chunk=64) >> bf16",
]


def spellings() -> list[str]:
    """Small blocks and chunks of the methods known here, and the plain spelling of every other one installed."""
    known = {word.split("(")[0].strip() for spelling in _SMALL for word in spelling.split(">>")}
    return [*_SMALL, *(str(row["spelling"]) for row in describe_compressors() if row["name"] not in known)]


@functools.cache
def inbox(spelling: str) -> Inbox:
    """What checks the frames of a run with this compressor; it knows one plan."""
    made = Inbox(SCHEMA, Codec(parse_compressor(spelling)), Codec(parse_compressor("none")), channels=2)
    made.expect(THE_PLAN)
    return made


def take_frame(spelling: str, data: bytes) -> tuple[Frame, torch.Tensor]:
    """The whole way of a frame that came in: size, hash, signature, body; then that it is what it must be."""
    receiver = inbox(spelling)
    frame, decoded = receiver.check(data, HEAD)
    assert frame.data == data
    if decoded is None:
        codec, shapes = receiver.codec_of(frame.header), receiver.shapes_of(frame.header)
        body, _ = receiver.tail.split(frame)
        decoded = codec.decompress(receiver.unpacked.get(frame) or codec.unpack(body, shapes))
    check_decoded(decoded, receiver.shapes_of(frame.header))
    return frame, decoded


def check_decoded(decoded: torch.Tensor, shapes: Shapes) -> None:
    """Flat, float32, finite."""
    assert decoded.shape == (numel(shapes),)
    assert decoded.dtype == torch.float32
    assert bool(torch.isfinite(decoded).all())


def sealed(data: bytes) -> bytes:
    """The frame with the hash and the signature that its bytes should have, where it has room for them."""
    if len(data) < HEADER_NBYTES:
        return data
    at = HEADER_NBYTES - SIGNATURE_NBYTES
    content = data[HEADER_NBYTES:]
    signed = data[: at - 32] + hashlib.blake2b(content, digest_size=32).digest()
    sender = data[104:136]
    signer = SIGNERS[PEERS.index(sender)] if sender in PEERS else SIGNERS[0]
    return signed + signer.sign(signed) + content


def sealed_lease(data: bytes) -> bytes:
    """The lease, a message, with the signature of the first peer."""
    if len(data) < 2 + SIGNATURE_NBYTES:
        return data
    return data[:-SIGNATURE_NBYTES] + SIGNERS[0].sign(b"decentral lease 2\0" + data[2:-SIGNATURE_NBYTES])


def sealed_invite(content: bytes) -> str:
    """The line of an invite with this content, its length and checksum right."""
    import base64

    data = struct.pack("<H", len(content) & 0xFFFF) + content
    data += hashlib.blake2b(data, digest_size=4).digest()
    return "decentral1:" + base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


# ---- the targets ----


@dataclass(frozen=True)
class Target:
    """``read`` returns, or raises ``refusal``; any other exception is a bug.

    ``guided``: worth libFuzzer's time. The others differ from one that is in nothing that their bytes decide, or need a
    signature, which only the mutator of frames makes.
    """

    name: str
    read: Callable[[bytes], object]
    refusal: type[Exception] | tuple[type[Exception], ...] = PayloadError
    guided: bool = True


def _frame(data: bytes) -> object:
    return take_frame("topk(k=3, chunk=64) >> signmag2", data)


def _piece(data: bytes) -> object:
    """A piece that came in, from whomever: what is kept of it is bounded by the schema."""
    receiver = inbox("topk(k=3, chunk=64) >> signmag2")
    puzzle = Reassembly(lambda header: receiver.max_nbytes(header, HEAD))
    piece = read_piece(data)
    assert piece.to_bytes() == data
    return puzzle.add(piece, piece.header.sender)


def _want(data: bytes) -> object:
    """Of a frame of 200 bytes: the answer is never longer."""
    want = read_want(data)
    assert want.to_bytes() == data
    assert len(want.of(bytes(200))) <= 200
    return want


def _group(make: type, data: bytes) -> object:
    """A message of machines that form a group."""
    found = from_bytes(make, data)
    assert to_bytes(found) == data
    return found


def _stage_body(data: bytes) -> object:
    """What comes to the middle stage of three, from the one before it: it is held, or refused, and as long as known."""
    record = GroupRecord(RUN, 7, tuple((peer, place, place + 1) for place, peer in enumerate(PEERS)), 2, 2)
    states, targets = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    forms = Forms.of(record, states, states, targets, dict.fromkeys(PEERS, 4))
    held = StageInbox(record, PEERS[1], forms, ThreadBell())
    body = Body.read(data)
    assert body.to_bytes() == data
    held.put(PEERS[0], body)
    if body.kind is BodyKind.STATES:
        assert forms.comes is not None
        read = forms.comes.read(body.values)
        assert read.shape == states.shape
        assert torch.isfinite(read).all()
    if body.kind is BodyKind.WAITS:
        assert held.waiting[PEERS[0]] in PEERS
        assert not held._held
    if body.kind is BodyKind.DONE:
        assert len(Done.read(body.values).norms_P) <= 4
    return body


def _sealed_frame(data: bytes) -> object:
    return take_frame("topk(k=3, chunk=64) >> signmag2", sealed(data))


def _any_frame(data: bytes) -> object:
    """No rule about the size but its own."""
    frame = parse(data, lambda header: len(data))
    assert frame.data == data
    return frame


def read_body(codec: Codec, shapes: Shapes, data: bytes) -> torch.Tensor:
    """Decoded, and added to zeros with the same outcome: nothing of a refused tensor is added."""
    total = torch.zeros(numel(shapes))
    try:
        decoded = codec.decode(data, shapes)
    except PayloadError:
        with contextlib.suppress(PayloadError):
            codec.add(total, codec.unpack(data, shapes))
            raise AssertionError("add takes what decode refuses") from None
        assert len(shapes) > 1 or not total.any(), "a refused body was added in part"
        raise
    check_decoded(decoded, shapes)
    codec.add(total, codec.unpack(data, shapes))
    assert torch.equal(total, decoded + 0.0)
    return decoded


def _body(spelling: str, shapes: Shapes, data: bytes) -> object:
    codec = inbox(spelling).codec
    if len(data) > codec.max_body_nbytes(shapes):
        raise PayloadError("longer than the schema allows: `frames.parse` says so before a body is read")
    return read_body(codec, shapes, data)


def _stream(*forms: Form) -> Callable[[bytes], object]:
    kinds = [form.kind for form in forms]

    def read(data: bytes) -> object:
        arrays, taken = coding.decode(forms, np.frombuffer(data, dtype=np.uint8))
        again = b"".join(coding.encode(kinds, arrays))
        raw = data[:4] == bytes(4)  # the longer of the two ways is not refused
        assert again == data[:taken] or (raw and len(again) < taken)
        for form, array in zip(forms, arrays, strict=True):
            assert array.shape == form.shape
            assert array.dtype == form.dtype
        return arrays

    return read


def _message(data: bytes) -> object:
    message = messages.decode(data)
    assert messages.encode(message) == data
    return message


def _record(data: bytes) -> object:
    record = messages.decode_record(data)
    assert messages.encode_record(record) == data
    return record


def _lease(data: bytes) -> object:
    return read_lease(data)


def _sealed_lease(data: bytes) -> object:
    lease = read_lease(sealed_lease(data))
    assert messages.encode(lease)[:-SIGNATURE_NBYTES] == data[:-SIGNATURE_NBYTES]
    return lease


def _invite(data: bytes) -> object:
    line = data.decode("latin-1")
    invite = Invite.parse(line)
    assert str(invite) == "".join(line.split())
    return invite


def _sealed_invite(data: bytes) -> object:
    return Invite.parse(sealed_invite(data))


_OUTER = Layout((("anchor/0", 144), ("anchor/1", 18)))


def _snapshot_index(data: bytes) -> object:
    index = SnapshotIndex.from_bytes(data, _OUTER)
    assert index.to_bytes() == data
    assert SnapshotIndex.document(data) == index.meta
    return Head.from_dict(index.meta.get("head"))


_ROW = bytes(range(256)) * (CHUNK_NBYTES // 256) + b"\0" * 40
_ROW_LAYOUT = Layout((("anchor/0", len(_ROW) // 4),))
_ROW_INDEX = SnapshotIndex(_ROW_LAYOUT, {}, (chunk_hash(_ROW[:CHUNK_NBYTES]), chunk_hash(_ROW[CHUNK_NBYTES:])))


def _chunk(data: bytes) -> object:
    """A number, u32, and a chunk's bytes."""
    if len(data) < 4:
        raise PayloadError("no number")
    assembler = Assembler(_ROW_INDEX)
    number, content = int.from_bytes(data[:4], "little", signed=True), data[4:]
    try:
        assembler.add(number, content)
    except PayloadError:
        assert assembler.missing() == [0, 1]
        raise
    assert assembler.missing() == [1 - number]
    return number


PACKED_NBYTES = 400


def _packed_chunk(data: bytes) -> object:
    """A chunk in the form that a donor chose."""
    chunk = from_form(data, PACKED_NBYTES)
    assert len(chunk) == PACKED_NBYTES
    assert from_form(to_form(chunk, BY_PLANES), PACKED_NBYTES) == chunk
    return chunk


def _packed_file(data: bytes) -> object:
    """A model that somebody packed."""
    packed, plain = _folder() / "packed", _folder() / "plain"
    packed.write_bytes(data)
    try:
        unpack_file(packed, plain)
    except DiskError:
        assert not plain.exists()
        raise
    content = plain.read_bytes()
    plain.unlink()
    return content


def _json(data: bytes) -> object:
    """What a peer's JSON holds; those who call for it catch these three."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"not JSON: {type(error).__name__}") from None


def _head(data: bytes) -> object:
    return Head.from_dict(_json(data))


def _schema(data: bytes) -> object:
    schema = Schema.from_json(data.decode("utf-8", "replace"))
    assert Schema.from_json(schema.to_json()) == schema
    assert 0 <= schema.numel < 2**63
    return schema


def _manifest(data: bytes) -> object:
    manifest = parse_manifest(data.decode("utf-8", "replace"))
    assert parse_manifest(manifest.to_toml()) == manifest
    check_methods(manifest)
    return manifest


def _compressor(data: bytes) -> object:
    compressor = parse_compressor(data.decode("utf-8", "replace"))
    assert str(parse_compressor(str(compressor))) == str(compressor)
    assert all(math.prod(spec.shape) >= 0 for spec in compressor.layout((3, 5)))
    return compressor


@functools.cache
def _folder() -> Path:
    """Of this process."""
    folder = tempfile.mkdtemp(prefix="decentral-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _header_hash(data: bytes) -> str:
    size = min(int.from_bytes(data[:8], "little"), len(data))
    return hashlib.blake2b(data[: 8 + size], digest_size=32).hexdigest()


def _tensor_file(data: bytes) -> object:
    """A safetensors file whose header has the hash that was written down: what the library reads is a stranger's."""
    path = _folder() / TENSORS
    path.write_bytes(data)
    return read_tensor_file(path, {"": _header_hash(data), "a": hashlib.blake2b(bytes(8), digest_size=32).hexdigest()})


def _checkpoint(data: bytes) -> object:
    (_folder() / META).write_bytes(data)
    (_folder() / TENSORS).write_bytes(b"")
    return read_checkpoint(_folder())


def _journal(data: bytes) -> object:
    """Any bytes open as a journal: what is damaged is cut off, what is before it stays."""
    path = _folder() / "journal"
    path.write_bytes(data)
    with Journal(path) as journal:
        kept = sum(HEAD_NBYTES + len(entry) for entry in journal.entries)
        assert kept + journal.dropped_nbytes == len(data)
    assert path.read_bytes() == data[:kept]
    return list(journal.entries)


def _optimizer_state(data: bytes) -> object:
    return unflatten(_json(data), {"optimizer/0": torch.zeros(2)})


def _multiaddr(data: bytes) -> object:
    text = multiaddr_to_text(data)
    assert multiaddr_to_text(multiaddr_to_bytes(text)) == text if len(text) <= LONGEST_MULTIADDR else True
    return text


def _multiaddr_text(data: bytes) -> object:
    packed = multiaddr_to_bytes(data.decode("utf-8", "replace"))
    return multiaddr_to_text(packed)


def _varint(data: bytes) -> object:
    number, at = read_varint(data)
    assert varint(number) == data[:at]
    return number


def _relay_question(data: bytes) -> object:
    peer = read_question(data)
    assert peer is None or is_sound(peer)
    return peer


def _dialback_question(data: bytes) -> object:
    question = from_bytes(paths.Question, data)
    assert to_bytes(question) == data
    return question


def _dialback_answer(data: bytes) -> object:
    """Whatever an answer calls this machine, what is made of it next ends in a place or in none."""
    answer = from_bytes(paths.DialbackAnswer, data)
    assert to_bytes(answer) == data
    assert math.isfinite(answer.milliseconds / 1000)
    where = endpoint(answer.seen)
    assert where is None or 0 < where[1] < 1 << 16
    return answer


def _announcement(data: bytes) -> object:
    sighting = read_announcement(data, RUN)
    if sighting is not None:
        assert 0 < len(sighting.addresses) <= MOST_ADDRESSES
        assert local_addresses(sighting.addresses) == sighting.addresses
        assert all(multiaddr_to_text(multiaddr_to_bytes(address)) == address for address in sighting.addresses)
        assert read_announcement(write_announcement(RUN, sighting.peer, sighting.addresses), RUN) == sighting
    return sighting


def _punch_message(data: bytes) -> object:
    ends = holepunch.plausible(holepunch.read_punch(data, holepunch.PunchMessage.CONNECT), None)
    assert len(ends) <= holepunch.MOST_ADDRESSES
    assert all(ipaddress.ip_address(host).is_global for host, _ in ends)
    return ends


def _kept_label(data: bytes) -> object:
    """What stands on a piece that a keeper is given, or gives back: how much it asks for is bounded."""
    label = Label.read(data)
    assert label.to_bytes() == data
    assert 0 < label.chunk_nbytes <= pieces.CHUNK_NBYTES
    assert label.state_nbytes <= label.stripes * label.stripe_nbytes < label.state_nbytes + label.stripes * 8 * 32
    assert label.piece_nbytes <= pieces.MOST_STRIPES * (pieces.CHUNK_NBYTES + pieces.SEAL_NBYTES)
    return label


def _words_first_message(data: bytes) -> object:
    """Whoever sends one without the words proves nothing by it."""
    host = WordsHandshake(b"acid cargo mural tulip 4711", PEERS[0], PEERS[1], is_guest=False)
    host.hear(data)
    assert not host.takes(bytes(PROOF_NBYTES))
    return data


def _words(data: bytes) -> object:
    code = parse_code(data.decode("latin-1"))
    assert parse_code(str(code)) == code
    return code


def _form(kind: coding.Kind, shape: tuple[int, ...], dtype: str) -> Form:
    return Form(kind, shape, np.dtype(dtype))


def _targets() -> list[Target]:
    partial, every = functools.partial, spellings()
    return [
        Target("frame", _frame),
        Target("piece", _piece),
        Target("want", _want),
        Target("group offered", partial(_group, Offered)),
        Target("group record", partial(_group, GroupRecord)),
        Target("group sealed", partial(_group, Sealed)),
        Target("stage body", _stage_body),
        Target("sealed frame", _sealed_frame),
        Target("any frame", _any_frame),
        *(Target(f"frame {spelling}", partial(take_frame, spelling), guided=False) for spelling in every),
        *(Target(f"body {spelling}", partial(_body, spelling, SHAPES[0])) for spelling in every),
        *(Target(f"bodies {spelling}", partial(_body, spelling, SHAPES[1]), guided=False) for spelling in every),
        Target("stream symbols 2", _stream(_form(Symbols(2), (40,), "u1"))),
        Target("stream symbols 8", _stream(_form(Symbols(8), (40,), "u1"), _form(Symbols(8), (0,), "u1"))),
        Target("stream rising", _stream(_form(Rising(300), (4, 5), "i2"), _form(Rising(7), (1, 7), "i2"))),
        Target("stream float32", _stream(_form(Floats(), (24,), "u4"))),
        Target("stream bfloat16", _stream(_form(Floats(), (24,), "u2"), _form(Floats(), (3,), "u2"))),
        Target("message", _message),
        Target("record", _record),
        Target("lease", _lease),
        Target("sealed lease", _sealed_lease),
        Target("lease list", lambda data: list(read_leases(data))),
        Target("chain", split_commits),
        Target("oldest", split_oldest),
        Target("acceptor", Acceptor.from_bytes),
        Target("invite", _invite, InviteError),
        Target("sealed invite", _sealed_invite, InviteError),
        Target("snapshot index", _snapshot_index),
        Target("chunk", _chunk),
        Target("packed chunk", _packed_chunk),
        Target("packed file", _packed_file, DiskError),
        Target("head", _head),
        Target("hello", Hello.from_bytes, (PayloadError, VersionError)),
        Target("schema", _schema),
        Target("manifest", _manifest, ConfigError),
        Target("compressor", _compressor, ConfigError),
        Target("tensor file", _tensor_file, DamagedFile),
        Target("checkpoint", _checkpoint, DamagedFile),
        Target("journal", _journal),
        Target("optimizer state", _optimizer_state, (PayloadError, ConfigError)),
        Target("multiaddr", _multiaddr),
        Target("multiaddr text", _multiaddr_text),
        Target("varint", _varint),
        Target("relay question", _relay_question, (PayloadError, Refused)),
        Target("dialback question", _dialback_question),
        Target("dialback answer", _dialback_answer),
        Target("announcement", _announcement),
        Target("punch message", _punch_message),
        Target("kept label", _kept_label),
        Target("words first message", _words_first_message, guided=False),
        Target("words", _words, InviteError, guided=False),
    ]


TARGETS = {target.name: target for target in _targets()}
