"""What is read from a file or a donor: snapshots, JSON, TOML, safetensors, addresses."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

from decentral.state.snapshot import Layout, SnapshotIndex
from decentral.swarm.announcement import run_tag
from decentral.swarm.hello import WIRE_VERSION
from decentral.transport.protocols import messages
from decentral.transport.protocols.messages import bytes_field, number_field
from decentral.wire.keys import peer_name
from tests.fuzz.targets import HEAD, PEERS, RUN
from tests.kit.builders import ACCEPTED, STRANGE, Entry, put


def index_bytes(meta: bytes, chunks: int = 1, digest: bytes | None = None, **head: int) -> bytes:
    """A snapshot's index with any document."""
    layout = Layout((("anchor/0", 144), ("anchor/1", 18)))
    fields = {"version": 1, "zero": 0, "meta_nbytes": len(meta)} | head
    packed = struct.pack(
        "<4sHH32sII", b"DCSN", fields["version"], fields["zero"], digest or layout.digest, chunks, fields["meta_nbytes"]
    )
    return packed + meta + bytes(32) * chunks


def _snapshots() -> Iterator[Entry]:
    target = "snapshot index"
    document = json.dumps({"head": HEAD.to_dict()}, sort_keys=True, separators=(",", ":")).encode()
    good = index_bytes(document)
    assert SnapshotIndex.from_bytes(good, Layout((("anchor/0", 144), ("anchor/1", 18)))).meta
    yield target, "as it should be", good, ACCEPTED
    yield target, "empty", b"", "index of 0 bytes"
    yield target, "less one", good[:-1], "bytes long"
    yield target, "and one", good + b"\0", "bytes long"
    yield target, "magic", b"X" + good[1:], "not an index of this version"
    yield target, "version 2", index_bytes(document, version=2), "not an index of this version"
    yield target, "reserved", index_bytes(document, zero=1), "not an index of this version"
    yield target, "another model", index_bytes(document, digest=bytes(32)), "of another model"
    yield target, "no chunks", index_bytes(document, 0), "0 chunks, the model needs 1"
    yield target, "chunks 2**32-1", put(good, 40, b"\xff" * 4), "4294967295 chunks, the model needs 1"
    yield target, "document of 2**32-1", index_bytes(document, meta_nbytes=2**32 - 1), "is too long"
    yield target, "document of 524289", index_bytes(document, meta_nbytes=524289), "is too long"
    yield target, "document of 524288", index_bytes(document, meta_nbytes=524288), "bytes long"
    yield target, "document longer than all", index_bytes(document, meta_nbytes=60000), "bytes long"
    for name, meta, words in [
        ("no document", b"", "no JSON object"),
        ("a list", b"[]", "no JSON object"),
        ("a number", b"1", "no JSON object"),
        ("nan", b'{"a":NaN}', "no JSON object"),
        ("infinity by digits", b'{"a":1e999}', "no JSON object"),
        ("deep", b'{"a":' + b"[" * 12000 + b"]" * 12000 + b"}", "no JSON object"),
        ("deep and open", b"[" * 12000, "no JSON object"),
        ("a number of 5000 digits", b'{"a":' + b"9" * 5000 + b"}", "no JSON object"),
        ("key twice", b'{"a":1,"a":1}', "not in canonical form"),
        ("spaces", b'{"a": 1}', "not in canonical form"),
        ("unsorted", b'{"b":1,"a":1}', "not in canonical form"),
        ("utf8 bom", b'\xef\xbb\xbf{"a":1}', "not in canonical form"),
        ("utf16", '{"a":1}'.encode("utf-16"), "not in canonical form"),
        ("not utf8", b'{"\xff":1}', "no JSON object"),
        ("lone surrogate", b'{"\\ud800":1}', "head of the chain"),
        ("no head", b"{}", "head of the chain"),
    ]:
        yield target, f"document {name}", index_bytes(meta), words
    yield from _chunks()


def _chunks() -> Iterator[Entry]:
    tail = b"\0" * 40  # all of the second chunk
    for number in (2, 2**31 - 1, -1, -(2**31)):
        yield "chunk", f"number {number}", struct.pack("<i", number) + tail, f"chunk {number} of a snapshot with 2"
    yield "chunk", "the last", struct.pack("<i", 1) + tail, ACCEPTED
    yield "chunk", "the last less one", struct.pack("<i", 1) + tail[:-1], "chunk 1 is not what the index names"
    yield "chunk", "the last and one", struct.pack("<i", 1) + tail + b"\0", "chunk 1 is not what the index names"
    yield "chunk", "the last altered", struct.pack("<i", 1) + tail[:-1] + b"\1", "chunk 1 is not what the index names"
    yield "chunk", "the last as the first", struct.pack("<i", 0) + tail, "chunk 0 is not what the index names"
    yield "chunk", "nothing", struct.pack("<i", 0), "chunk 0 is not what the index names"


def _documents() -> Iterator[Entry]:
    good = HEAD.to_dict()
    bad = "where JSON of ours was due"
    for name, change, words in [
        ("as it should be", {}, ACCEPTED),
        ("round -1", {"round": -1}, "out of bounds"),
        ("round 2**63", {"round": 2**63}, "out of bounds"),
        ("round text", {"round": "x"}, bad),
        ("round none", {"round": None}, bad),
        ("hash short", {"hash": "00"}, "out of bounds"),
        ("hash not hexadecimal", {"hash": "zz" * 32}, bad),
        ("hash a number", {"hash": 7}, bad),
        ("nobody", {"members": []}, "out of bounds"),
        ("members unsorted", {"members": good["members"][::-1]}, "out of bounds"),
        ("members 1025", {"members": [f"{n:064x}" for n in range(1025)]}, "out of bounds"),
        ("members none", {"members": None}, bad),
    ]:
        yield "head", name, json.dumps(good | change).encode(), words
    for name, text, words in [
        ("list", b"[]", bad),
        ("text", b'"x"', bad),
        ("nan", b"NaN", bad),
        ("deep", b"[" * 9999, ""),
    ]:
        yield "head", name, text, words or "not JSON"
    yield from _schemas()
    yield from _states()


def _schemas() -> Iterator[Entry]:
    rubbish = "this is no schema of a model: "
    for name, text, words in [
        ("as it should be", b'[[["a",[3,4]],["b",[]]]]', ACCEPTED),
        ("of nothing but size", b'[[["a",[0,17592186044416]]]]', ACCEPTED),
        ("empty", b"", "not JSON"),
        ("no fragments", b"[]", "a list of 1 to 1024"),
        ("empty fragment", b"[[]]", "a list of 1 to 100000"),
        ("object", b"{}", "a list of 1 to 1024"),
        ("negative", b'[[["a",[-1]]]]', "a dimension is a whole number"),
        ("true", b'[[["a",[true]]]]', "a dimension is a whole number"),
        ("float", b'[[["a",[1.0]]]]', "a dimension is a whole number"),
        ("2**45", b'[[["a",[35184372088832]]]]', "a dimension is a whole number"),
        ("product too large", b'[[["a",[17592186044416,2]]]]', "elements are read"),
        ("product beyond 64 bits", b'[[["a",[17592186044416,17592186044416]]]]', "elements are read"),
        ("dimensions 17", b'[[["a",[' + b"1," * 16 + b"1]]]]", "at most 16 dimensions"),
        ("name twice", b'[[["a",[1]],["a",[1]]]]', "named twice"),
        ("name empty", b'[[["",[1]]]]', "a name 1 to 512"),
        ("name 513", b'[[["' + b"a" * 513 + b'",[1]]]]', "a name 1 to 512"),
        ("name a number", b"[[[1,[1]]]]", "a parameter is"),
        ("deep", b"[" * 12000, "not JSON"),
        ("number of 5000 digits", b'[[["a",[' + b"9" * 5000 + b"]]]]", "not JSON"),
        ("utf8 bom", b'\xef\xbb\xbf[[["a",[1]]]]', "not JSON"),
    ]:
        yield "schema", name, text, words if words == ACCEPTED else words if words else rubbish


def _states() -> Iterator[Entry]:
    for name, text, words in [
        ("tensor", b'{"tensor":"optimizer/0"}', ACCEPTED),
        ("unknown tensor", b'{"tensor":"x"}', "KeyError"),
        ("tensor a list", b'{"tensor":[]}', "TypeError"),
        ("two tags", b'{"list":[],"tuple":[]}', "ValueError"),
        ("no tag", b"{}", "ValueError"),
        ("unknown tag", b'{"pickle":"gASVHg=="}', "unknown tag"),
        ("key a list", b'{"dict":[[{"list":[]},1]]}', "TypeError"),
        ("deep", b'{"list":[' * 900 + b"]}" * 900, "RecursionError"),
    ]:
        yield "optimizer state", name, text, words
    for name, text, words in [
        ("empty", b"", "JSONDecodeError"),
        ("list", b"[]", "TypeError"),
        ("another format", b'{"document":{"format":2,"meta":{},"hashes":{}}}', "format 2, this version reads 1"),
        ("hash missing", b'{"document":{"format":1,"meta":{},"hashes":{}}}', "its hash does not match"),
        ("hashes a number", b'{"document":{"format":1,"meta":{},"hashes":1}}', "TypeError"),
        ("meta nan", b'{"document":{"format":1,"meta":NaN,"hashes":{}}}', "ConfigError"),
        ("deep", b'{"document":' * 2500, "RecursionError"),
    ]:
        yield "checkpoint", name, text, words
    yield "journal", "length 2**32-1", b"\xff" * 40, ACCEPTED  # cut off; the journal is empty
    yield "journal", "entry cut short", b"\4\0\0\0" + bytes(16) + b"abc", ACCEPTED


def _manifests() -> Iterator[Entry]:
    good = '[run]\nname = "a"\n[outer]\nmethod = "diloco"\n[compressor]\nchain = "none"\n[exchange]\nkind = "gather"\n'
    for name, text, words in [
        ("as it should be", good, ACCEPTED),
        ("empty", "", "run is missing"),
        ("utf8 bom", "\ufeff" + good, "not TOML"),
        ("nul", good.replace("a", "\0", 1), "not TOML"),
        ("name a path", good.replace('"a"', '"../../etc/passwd"'), "has characters that do not belong"),
        ("name right to left", good.replace('"a"', '"\u202e"'), "has characters that do not belong"),
        ("name 65", good.replace('"a"', '"' + "a" * 65 + '"'), "has characters that do not belong, or too many"),
        ("name with a newline", good.replace('"a"', '"a\\n"'), "has characters that do not belong"),
        ("unknown table", good + "[secret]\n", "unknown table secret"),
        ("unknown key", good.replace("[outer]", "[outer]\nlr = 1"), "unknown key outer.lr"),
        ("nan", good.replace("[outer]", "[outer]\nlearning_rate = nan"), "learning_rate = nan"),
        ("seed 2**63", good.replace('"a"', '"a"\nseed = 9223372036854775808'), "seed"),
        ("float overflow", good.replace("[outer]", "[outer]\nlearning_rate = 1e999"), "learning_rate = inf"),
        ("unknown compressor", good.replace("none", "zip"), "zip"),
        ("unknown method", good.replace("diloco", "adam"), "adam"),
        ("deep lists", good.replace('"a"', "[" * 250 + "]" * 250), "run.name"),
        ("lists without end", good.replace('"a"', "[\n" * 5000), "not TOML"),
        ("long", "#" * 70000, "longer than 65536 bytes"),
    ]:
        yield "manifest", name, text.encode(), words
    for name, text, words in [
        ("chain of three", "topk >> topk >> none", "one >> joins two methods"),
        ("quantiser first", "int8 >> none", "must be a sparsifier"),
        ("not finite", "int8(block=nan)", "must be a whole number"),
        ("1e999", "topk(k=1e999)", "must be a whole number"),
        ("200 digits", "int8(block=" + "9" * 200 + ")", "a block has 1 to 65536 values"),
        ("twice", "topk(k=1, k=1)", "given twice"),
        ("code", "__import__('os')", "is not key=number"),
        ("long", "a" * 5000, "characters: at most"),
    ]:
        yield "compressor", name, text.encode(), words


def tensor_file(header_: object, data: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    text = header_ if isinstance(header_, bytes) else json.dumps(header_).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    """One tensor of such a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _tensor_files() -> Iterator[Entry]:
    altered, library = "tensor a is not what was written", "Error while deserializing header"
    for name, data, words in [
        ("as it should be", tensor_file({"a": entry([2], 0, 8)}, bytes(8)), ACCEPTED),
        ("empty", b"", "header too small"),
        ("seven bytes", bytes(7), "header too small"),
        ("length 2**64-1", b"\xff" * 8 + b"{}", "the header says 18446744073709551615 bytes"),
        ("length 2**31", (2**31).to_bytes(8, "little") + b"{}", "the header says 2147483648 bytes"),
        ("overlap", tensor_file({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, bytes(4)), library),
        ("hole", tensor_file({"a": entry([1], 4, 8)}, bytes(8)), library),
        ("trailing", tensor_file({"a": entry([1], 0, 4)}, bytes(5)), library),
        (
            "key twice",
            tensor_file(b'{"a":%b,"a":%b}' % ((json.dumps(entry([1], 0, 4)).encode(),) * 2), bytes(4)),
            altered,
        ),
        ("overflow", tensor_file({"a": entry([2**62, 2**62], 0, 0)}), library),
        ("nothing of 2**60", tensor_file({"a": entry([0, 2**60], 0, 0)}), altered),
        ("nothing of 2**124", tensor_file({"a": entry([0, 2**62, 2**62], 0, 0)}), altered),
        ("negative", tensor_file({"a": entry([-1], 0, 0)}), library),
        ("dtype unknown", tensor_file({"a": entry([4], 0, 3, "F6_E2M3")}, b"abc"), "Dtype not understood"),
        ("dtype of ours it is not", tensor_file({"a": entry([8], 0, 8, "U8")}, b"abcdefgh"), altered),
        ("another name", tensor_file({"b": entry([2], 0, 8)}, bytes(8)), "it names other tensors"),
        ("deep", tensor_file(b'{"a":' + b"[" * 12000 + b"]" * 12000 + b"}"), library),
        (
            "notes",
            tensor_file({"__metadata__": {str(n): "" for n in range(900)}, "b": entry([0], 0, 0)}),
            "other tensors",
        ),
        ("pickle", STRANGE["pickle"], "the header says"),
        ("zip", STRANGE["zip"], "the header says"),
    ]:
        yield "tensor file", name, data, words


def _addresses() -> Iterator[Entry]:
    wrong = "is malformed or not a way to reach a peer"
    yield "multiaddr", "as it should be", messages.multiaddr_to_bytes("/ip4/192.0.2.1/udp/4001/quic-v1"), ACCEPTED
    yield "multiaddr", "empty", b"", wrong
    yield "multiaddr", "cut short", b"\4\xc0\0\2", wrong
    yield "multiaddr", "unknown protocol", b"\7\1", wrong
    yield "multiaddr", "length beyond", b"\x35\xff\xff\3a", wrong
    yield "multiaddr", "peer of another kind", b"\xa5\3\2\0\0", wrong
    yield "varint", "ten bytes", b"\xff" * 9 + b"\1", "no end within 5 bytes"
    yield "varint", "cut short", b"\x80", "no end within 5 bytes"
    yield "varint", "empty", b"", "no end within 5 bytes"
    yield "varint", "largest", b"\xff\xff\xff\xff\x7f", ACCEPTED
    for name, text, words in [
        ("as it should be", "/dns4/example.org/tcp/443/wss", ACCEPTED),
        ("port 65536", "/ip4/192.0.2.1/tcp/65536", wrong),
        ("port -1", "/ip4/192.0.2.1/tcp/-1", wrong),
        ("no slash", "ip4/192.0.2.1", wrong),
        ("slash alone", "/", wrong),
        ("path", "/../../etc/passwd", wrong),
        ("257 characters", "/dns/" + "a" * 252, wrong),
        ("right to left", "/dns/\u202e", wrong),
        ("peer of nobody", "/p2p/12D3KooW", "is not an Ed25519 libp2p id"),
    ]:
        yield "multiaddr text", name, text.encode(), words


def _relay_questions() -> Iterator[Entry]:
    target = "relay question"
    strange = {"nul": "no end within 10 bytes", "all ones": "no end within 5 bytes"}
    peer = bytes.fromhex("002408011220") + PEERS[0]

    def connect(who: bytes) -> bytes:
        return number_field(1, 1) + bytes_field(2, who)

    yield target, "a place", number_field(1, 0), ACCEPTED
    yield target, "empty", b"", ACCEPTED  # go-libp2p takes it for a question for a place, too
    yield target, "to a peer", connect(bytes_field(1, peer)), ACCEPTED
    yield target, "to a peer with addresses", connect(bytes_field(1, peer) + bytes_field(2, b"\4") * 60), ACCEPTED
    yield target, "to the last one named", connect(bytes_field(1, b"?") + bytes_field(1, peer)), ACCEPTED
    yield target, "to nobody", number_field(1, 1), "asked to connect to nobody"
    yield target, "to a peer without an id", connect(bytes_field(2, peer)), "asked to connect to nobody"
    yield (
        target,
        "to a peer of another kind",
        connect(bytes_field(1, b"\x12\x20" + bytes(32))),
        "not an Ed25519 identity",
    )
    yield target, "to a peer less one", connect(bytes_field(1, peer[:-1])), "not an Ed25519 identity"
    yield target, "to a weak key", connect(bytes_field(1, peer[:6] + bytes(32))), "not an Ed25519 identity"
    yield target, "an answer", number_field(1, 2) + number_field(5, 100), "a message of type 2 is no question"
    yield target, "type 2**35-1", number_field(1, 2**35 - 1), "a message of type 34359738367 is no question"
    yield target, "type of 64 bits", b"\x08" + b"\xff" * 9 + b"\1", f"a message of type {2**64 - 1} is no question"
    yield target, "type of 65 bits", b"\x08" + b"\xff" * 9 + b"\2", "more than 64 bits"
    yield target, "type of eleven bytes", b"\x08" + b"\xff" * 10 + b"\1", "no end within 10 bytes"
    yield target, "peer cut short", connect(bytes_field(1, peer))[:-1], "cut short or of an unknown type"
    yield target, "peer of 2**32-1 bytes", number_field(1, 1) + b"\x12\xff\xff\xff\xff\x0f", "cut short"
    yield target, "fixed 64", b"\x09" + bytes(8), "cut short or of an unknown type"
    yield target, "65 fields", number_field(1, 0) * 65, "more than 64 fields"
    for name, data in STRANGE.items():
        yield target, name, data, strange.get(name, "cut short or of an unknown type")


def _announcements() -> Iterator[Entry]:
    target, name = "announcement", peer_name(PEERS[0])
    run, home = f"run={run_tag(RUN, PEERS[0])}", f"dnsaddr=/ip4/192.168.1.20/tcp/4001/p2p/{name}"

    def said(*words: str) -> bytes:
        return b"".join(bytes([len(word.encode())]) + word.encode() for word in words)

    yield target, "as it should be", said(run, home), ACCEPTED
    yield target, "the run last", said(home, run), ACCEPTED
    yield target, "empty", b"", ACCEPTED  # as are all below that are not of this run: other programs speak here, too
    yield target, "of another program", said("txtvers=1", "path=/../../etc/passwd"), ACCEPTED
    yield target, "of another run", said("run=0000000000000000", home), ACCEPTED
    yield target, "of no run", said(home), ACCEPTED
    yield target, "another peer's tag", said(f"run={run_tag(RUN, PEERS[1])}", home), ACCEPTED
    yield target, "a public address", said(run, f"dnsaddr=/ip4/8.8.8.8/tcp/53/p2p/{name}"), ACCEPTED
    yield target, "this machine", said(run, f"dnsaddr=/ip4/127.0.0.1/tcp/22/p2p/{name}"), ACCEPTED
    yield target, "a host name", said(run, f"dnsaddr=/dns4/router.local/tcp/80/p2p/{name}"), ACCEPTED
    yield target, "port 65536", said(run, f"dnsaddr=/ip4/10.0.0.1/tcp/65536/p2p/{name}"), ACCEPTED
    yield target, "a zone", said(run, f"dnsaddr=/ip6/fd00::1%eth0/tcp/1/p2p/{name}"), ACCEPTED
    yield target, "twenty addresses", said(run, *[home] * 20), ACCEPTED
    yield target, "thirty-two strings and one", said(run, home, *["a"] * 31), "more than 32 strings"
    yield target, "empty strings", bytes(33), "more than 32 strings"
    yield target, "2049 bytes", said(*["a" * 255] * 8) + bytes(1), "2049 bytes, at most 2048"
    yield target, "less one", said(run, home)[:-1], "a string is cut short"
    yield target, "length 255 and nothing", b"\xff", "a string is cut short"
    yield target, "nobody", said(run), "0 peers where one belongs"
    other = home.replace(name, peer_name(PEERS[1]))
    yield target, "two peers", said(run, home, other), "2 peers where one belongs"
    for what, who in {
        "nobody by name": "",
        "path": "../..",
        "right to left": "\u202e" * 17,
        "escape": "\x1b[2J",
    }.items():
        yield target, f"peer {what}", said(run, f"dnsaddr=/ip4/10.0.0.1/tcp/1/p2p/{who}"), "not an Ed25519 libp2p id"
    for what, data in STRANGE.items():
        yield target, what, data, ACCEPTED if what == "nul" else "is cut short"


def _found() -> Iterator[Entry]:
    """What was a bug once: found by reading or by a fuzzer, and each raised something else or took far too long."""
    good = HEAD.to_dict()
    yield "head", "round infinity", json.dumps(good | {"round": float("inf")}).encode(), "where JSON of ours was due"
    hello = {"wire": WIRE_VERSION, "version": "0.1.0", "manifest": "", "schema": "", "age": 1.0}
    for name, change in [("wire", {"wire": float("inf")}), ("age", {"age": 10**400})]:
        yield "hello", f"{name} beyond a float", json.dumps(hello | change).encode(), "does not parse (OverflowError)"
    yield "hello", "no manifest", json.dumps(hello).encode(), "the peer's manifest is none"
    yield (
        "hello",
        "version that moves the cursor",
        json.dumps(hello | {"wire": WIRE_VERSION + 1, "version": "\x1b[2J\n"}).encode(),
        "decentral ?[2J?",
    )
    yield "hello", "list", b"[]", "does not parse (TypeError)"
    state = b'{"float":' + b"9" * 400 + b"}"
    yield "optimizer state", "float beyond a float", state, "OverflowError"
    dots = "a line has more than 64 dots"
    yield "manifest", "a key of 3000 words", ("run" + ".a" * 3000 + " = 1").encode(), dots  # 30,000 took 20 s
    for name, value in {"hexadecimal": "0x" + "f" * 4000, "binary": "0b" + "1" * 16000}.items():
        yield "manifest", f"16000 bits {name}", f"[run]\nname = {value}\n".encode(), "run.name = int too large to show"
    yield "manifest", "a table 60 deep", f"[run.name{'.a' * 60}]\n".encode(), "run.name = {'a': {'a'"
    yield "varint", "a zero at its end", b"\x80\0", "there is a shorter one"
    wrong = "is malformed or not a way to reach a peer"
    yield "multiaddr", "a host name with a slash", b"\x35\x05a/tcp", wrong
    yield "multiaddr", "an empty host name", b"\x35\0", wrong
    yield "multiaddr", "an empty peer id", b"\xa5\3\0", wrong


def _punch_messages() -> Iterator[Entry]:
    target, connect = "punch message", number_field(1, 100)
    yield target, "an address", connect + bytes_field(2, bytes.fromhex("042d430009060fa1")), ACCEPTED
    yield target, "an address at home", connect + bytes_field(2, bytes.fromhex("040a00000106 0016")), ACCEPTED
    yield target, "no address", connect, ACCEPTED
    yield target, "no addresses but nonsense", connect + bytes_field(2, b"\xff" * 40), ACCEPTED
    yield target, "the other kind", number_field(1, 300), "a message of type 300 where CONNECT"
    yield target, "empty", b"", "where CONNECT"
    yield target, "cut short", connect + b"\x12\x7f", "cut short"
    yield target, "65 fields", connect + bytes_field(2, b"") * 64, "more than 64 fields"


def documents() -> Iterator[Entry]:
    """Every entry of this file."""
    for maker in (
        _snapshots,
        _documents,
        _manifests,
        _tensor_files,
        _addresses,
        _relay_questions,
        _announcements,
        _punch_messages,
        _found,
    ):
        yield from maker()
