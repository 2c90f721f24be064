"""Messages, records, leases, invites and dial-backs."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace

from decentral.redundancy.pieces import CHUNK_NBYTES, MOST_STRIPES, SEAL_NBYTES, Label
from decentral.swarm.invite import Invite
from decentral.swarm.leases import write_leases
from decentral.transport.paths import ANSWERED, NOT_TRIED, DialbackAnswer, Question
from decentral.wire import messages
from decentral.wire.codecs import to_bytes
from tests.fuzz.targets import ANCHOR, HASH, HEAD, PARTITION, PEERS, PLAN, REFS, ROUND, RUN, SIGNERS, THE_PLAN
from tests.kit.builders import ACCEPTED, STRANGE, Entry, counted, put, sized, sized_text

GATHERED = messages.Record(RUN, 1, ROUND, 16, 0, 0, HASH, ANCHOR, PEERS, REFS, (), (), PEERS, False)


REDUCED = replace(
    GATHERED,
    plan=PLAN,
    frames=tuple(replace(ref, part=part) for part, ref in enumerate(REFS)),
    contributors=REFS,
    partition=PARTITION,
)


def _messages() -> Iterator[Entry]:
    offer = messages.encode(messages.Offer(1, ROUND, 0, ANCHOR, HASH, 4344, 30, 15360))
    yield "message", "offer", offer, ACCEPTED
    yield "message", "empty", b"", "message of 0 bytes"
    yield "message", "one byte", b"\1", "message of 1 bytes"
    yield "message", "goodbye", b"\x0a\3", ACCEPTED
    yield "message", "goodbye and one", b"\x0a\3\0", "Goodbye has 1 bytes after its end"
    yield "message", "type 0", b"\0" + offer[1:], "unknown type 0"
    yield "message", "type 255", b"\xff" + offer[1:], "unknown type 255"
    yield "message", "version 1", b"\1\1" + offer[2:], "Offer in version 1"
    yield "message", "less one", offer[:-1], "Offer.summary: cut short: 1 bytes wanted, 0 left"
    yield "message", "summary of 64", offer[:-1] + b"\x40" + bytes(64), ACCEPTED
    yield "message", "summary of 65", offer[:-1] + b"\x41" + bytes(65), "Offer.summary: 65 bytes, at most 64"
    yield "message", "summary of 255 and nothing", offer[:-1] + b"\xff", "Offer.summary: 255 bytes, at most 64"
    yield "message", "two", offer + offer, "Offer has 115 bytes after its end"
    for name, data in STRANGE.items():
        yield "message", name, data, "message"
    missing = b"\3\3" + bytes(20)
    peers = "items are not sorted, or one is there twice"
    yield "message", "count 2**32-1", missing + counted(count=2**32 - 1), "Missing.peers: 4294967295 items, at most"
    yield "message", "count 1025", missing + counted(count=1025), "1025 items, at most 1024"
    yield "message", "count 1024 and nothing", missing + counted(count=1024), "cut short"
    yield "message", "nobody missing", missing + counted(), ACCEPTED
    yield "message", "peers twice", missing + counted(PEERS[0], PEERS[0]), peers
    yield "message", "peers unsorted", missing + counted(*PEERS[::-1]), peers
    promise = b"\7\3" + bytes(16) + struct.pack("<Ii", 2, -1)
    yield "message", "promise of nothing", promise + b"\0" + bytes(128), ACCEPTED
    yield "message", "flag 2", promise + b"\2", "flag byte 2, want 0 or 1"
    yield "message", "promise of something missing", promise + b"\1", "cut short"
    low = b"\7\3" + bytes(16) + struct.pack("<Ii", 2, -2)
    yield "message", "promise below nothing", low + b"\0" + bytes(128), "accepted ballot -2 without a record"
    farewell = b"\x10\3" + struct.pack("<QQi", 1, ROUND, -1)
    yield "message", "farewell", farewell + bytes(193), ACCEPTED
    yield (
        "message",
        "farewell of nothing, signed",
        farewell + b"\0" + bytes(64) + b"\1" * 64 + bytes(64),
        "a vote without a record",
    )
    elsewhere = messages.encode_record(replace(GATHERED, round=ROUND + 1))
    voted = b"\x10\3" + struct.pack("<QQi", 1, ROUND, 0) + b"\1"
    yield "message", "farewell of another round", voted + elsewhere + bytes(192), "in a farewell in round"
    yield "message", "plan", messages.encode(THE_PLAN), ACCEPTED
    yield from _plans()
    yield from _records()


def _plans() -> Iterator[Entry]:
    head = b"\2\3" + messages.encode(THE_PLAN)[2:26]
    ref = messages.encode(THE_PLAN)[30:119]
    for name, ranges, words in [
        ("hole", [(0, 100), (101, 144)], "does not begin where the one before ends, at 100"),
        ("overlap", [(0, 100), (99, 144)], "does not begin where the one before ends, at 100"),
        ("not from zero", [(1, 100), (100, 144)], "does not begin where the one before ends, at 0"),
        ("empty range", [(0, 100), (100, 100)], "or is empty"),
        ("backwards", [(0, 100), (100, 99)], "or is empty"),
        ("beyond every model", [(0, 100), (100, 2**64 - 1)], ACCEPTED),  # `Inbox` knows the model's size
    ]:
        packed = [peer + struct.pack("<QQ", *range_) for peer, range_ in zip(PEERS, ranges, strict=False)]
        yield "message", f"plan {name}", head + counted(ref) + counted(*packed), words
    yield "message", "plan of nothing", head + counted() + counted(), "without contributors or without a partition"
    yield "message", "plan count", head + counted(count=2**31), "2147483648 items"


def _records() -> Iterator[Entry]:
    gathered, reduced = messages.encode_record(GATHERED), messages.encode_record(REDUCED)
    yield "record", "of a gather", gathered, ACCEPTED
    yield "record", "of a reduce", reduced, ACCEPTED
    yield "record", "empty", b"", "Record.run: cut short"
    yield "record", "less one", gathered[:-1], "Record.final: cut short"
    yield "record", "and one", gathered + b"\0", "1 bytes after its end"
    yield "record", "final 255", gathered[:-1] + b"\xff", "flag byte 255"
    at = 32 + 8 * 3 + 8 + 64
    yield "record", "members 2**32-1", put(gathered, at, b"\xff" * 4), "Record.members: 4294967295 items"
    swapped = gathered[: at + 4] + PEERS[1] + PEERS[0] + gathered[at + 68 :]
    yield "record", "members unsorted", swapped, "not sorted"
    alone = reduced.replace(counted(*(p + struct.pack("<QQ", a, b) for p, a, b in PARTITION)), counted())
    yield "record", "contributors without a partition", alone, "names both its contributors and its partition"
    owner = put(reduced, reduced.index(PEERS[1], at + 100) + 64, b"\2")
    yield "record", "a result of no range", owner, "frames of a reduce are its owners' results"
    yield "chain", "nothing", b"", ACCEPTED
    yield "chain", "inside a length", b"\1\0", "ends inside a length"
    yield "chain", "length 2**32-1", b"\xff" * 4 + bytes(10), "ends inside a commit"
    yield "chain", "a goodbye", sized(b"\x0a\3"), "holds a Goodbye"
    commit = messages.encode(messages.Commit(GATHERED, messages.Certificate(0, ())))
    yield "chain", "two commits", sized(commit) * 2, ACCEPTED
    yield "chain", "a commit cut short", sized(commit[:-1]), "cut short"
    yield "oldest", "nothing", b"", "oldest head: "
    yield "oldest", "length 2**32-1", b"\xff" * 4 + b"{}", "head of the chain: "
    yield "oldest", "deep", sized(b"[" * 12000), "oldest head: "
    yield "oldest", "a number of 5000 digits", sized(b"9" * 5000), "oldest head: "
    yield "oldest", "a list", sized(b"[]"), "head of the chain: "
    yield "oldest", "a head and commits", sized(json.dumps(HEAD.to_dict()).encode()) + sized(commit) * 2, ACCEPTED
    yield "oldest", "a head and a goodbye", sized(json.dumps(HEAD.to_dict()).encode()) + sized(b"\x0a\3"), "a Goodbye"
    yield "acceptor", "cut short", bytes(23), "23 bytes is cut short"
    yield "acceptor", "of nothing", bytes(24), ACCEPTED
    yield "acceptor", "of nothing signed", b"acceptor 2\0" + bytes(88), ACCEPTED
    yield "acceptor", "signed and cut short", b"acceptor 2\0" + bytes(87), "is cut short"
    yield (
        "acceptor",
        "of a broken record",
        bytes(24) + gathered[:-1],
        "cut short: 1 bytes wanted, 0 left): it is damaged, or another version",
    )


LEASE = messages.Lease(RUN, PEERS[0], 7, 15, ("/ip4/192.0.2.1/tcp/4001",), 1, ROUND, ANCHOR, 2, 20_000_000, "0.1.0")


def _leases() -> Iterator[Entry]:
    good = messages.encode(messages.seal_lease(LEASE, SIGNERS[0]))
    at = 2 + 32 + 32 + 8 + 4  # the count of addresses
    yield "lease", "as it should be", good, ACCEPTED
    yield "lease", "signed by another", good[:-64] + SIGNERS[1].sign(good[:-64]), "not signed by the peer it names"
    yield "lease", "sequence raised", put(good, 66, b"\xff" * 8), "not signed by the peer it names"
    yield "lease", "another message", b"\x0a\3", "Goodbye where a lease belongs"
    yield "sealed lease", "seventeen addresses", put(good, at, b"\x11\0\0\0"), "17 items, at most 16"
    yield "sealed lease", "addresses 2**32-1", put(good, at, b"\xff" * 4), "4294967295 items"
    yield "sealed lease", "address of 257", put(good, at + 4, b"\1\1"), "text of 257 characters, at most 256"
    yield "sealed lease", "address of 65535", put(good, at + 4, b"\xff\xff"), "text of 65535 characters"
    for name, text in {
        "nul": b"\0",
        "space": b" ",
        "newline": b"\n",
        "escape": b"\x1b",
        "delete": b"\x7f",
        "utf8 bom": b"\xef\xbb\xbf",
        "right to left": "\u202e".encode(),
        "latin": b"\xe9",
    }.items():
        yield "sealed lease", f"address with {name}", put(good, at + 7, text), "other than visible ASCII"
    small = put(good, 34, bytes(32))
    yield "sealed lease", "key zero", small, "not signed by the peer it names"
    lists = write_leases([(3.0, messages.seal_lease(LEASE, SIGNERS[0]))] * 2)
    yield "lease list", "two", lists, ACCEPTED
    yield "lease list", "none", b"", ACCEPTED
    yield "lease list", "cut in a head", lists[:3], "is cut short"
    yield "lease list", "cut in a lease", lists[:-1], "names one of"
    yield "lease list", "of 65535 bytes", put(lists, 4, b"\xff\xff"), "names one of 65535 bytes"
    yield "lease list", "of no bytes", struct.pack("<IH", 1, 0), "message of 0 bytes"


def _invites() -> Iterator[Entry]:
    invite = Invite(RUN, ("/ip4/192.0.2.1/tcp/4001",), "word")
    line = str(invite).encode()
    yield "invite", "as it should be", line, ACCEPTED
    yield "invite", "with line breaks", line[:40] + b"\r\n  " + line[40:] + b"\n", ACCEPTED
    yield "invite", "empty", b"", "empty; an invite begins with"
    yield "invite", "prefix alone", b"decentral1:", "cut short"
    yield "invite", "less one", line[:-1], "cut short"
    yield "invite", "and one", line + b"AAAA", "something follows its end"
    yield "invite", "another version", line.replace(b"1:", b"2:", 1), "another version of this program"
    yield "invite", "a letter altered", put(line, 30, b"A" if line[30:31] != b"A" else b"B"), "altered on the way"
    yield "invite", "last letter has a spare bit", line[:-1] + bytes([line[-1] + 1]), "altered"
    yield "invite", "padding", line + b"=", "altered"
    yield "invite", "plus and slash", line[:20] + b"+/" + line[22:], "altered"
    yield "invite", "nul", put(line, 20, b"\0"), "characters that do not belong"
    yield "invite", "utf8 bom", b"\xef\xbb\xbf" + line, "is not an invite"
    yield "invite", "right to left", "\u202e".encode() + line, "is not an invite"
    yield "invite", "path", b"../../etc/passwd", "../../etc/passwd is not an invite"
    yield "invite", "very long", b"decentral1:" + b"A" * 9000, "characters are too many"
    yield "invite", "many zeros", b"decentral1:" + b"A" * 8000, "something follows its end"
    content = RUN + counted(sized_text(b"/a")) + b"\0"
    yield "sealed invite", "as it should be", content, ACCEPTED
    yield "sealed invite", "less one", content[:-1], "cut short"
    yield "sealed invite", "and one", content + b"\0", "1 bytes after its end"
    yield "sealed invite", "address without a slash", RUN + counted(sized_text(b"a")) + b"\0", "does not begin with /"
    yield "sealed invite", "empty address", RUN + counted(sized_text(b"")) + b"\0", "does not begin with /"
    yield "sealed invite", "nine addresses", RUN + counted(count=9), "9 items, at most 8"
    yield "sealed invite", "addresses 2**32-1", RUN + counted(count=2**32 - 1), "4294967295 items"
    yield "sealed invite", "token flag 2", content[:-1] + b"\2", "flag byte 2"
    yield "sealed invite", "token of 129", content[:-1] + b"\1" + sized_text(b"a" * 129), "text of 129 characters"
    yield "sealed invite", "token with a newline", content[:-1] + b"\1" + sized_text(b"a\nb"), "visible ASCII"


def _dialbacks() -> Iterator[Entry]:
    target, port = "dialback question", to_bytes(Question(4001))
    yield target, "as it should be", port, ACCEPTED
    yield target, "port 0", b"\0\0", ACCEPTED  # it listens nowhere: it is told how it is seen, and not dialled
    yield target, "port 65535", b"\xff\xff", ACCEPTED
    yield target, "empty", b"", "Question.port: cut short: 2 bytes wanted, 0 left"
    yield target, "less one", port[:1], "Question.port: cut short"
    yield target, "two", port * 2, "Question has 2 bytes after its end"
    for name, data in STRANGE.items():
        yield target, name, data, "cut short" if name == "nul" else "bytes after its end"
    yield from _dialback_answers()


def _dialback_answers() -> Iterator[Entry]:
    target, seen = "dialback answer", "/ip4/192.0.2.1/tcp/4001"
    good = to_bytes(DialbackAnswer(seen, ANSWERED, 1_700_000_000_000))
    outcome = 2 + len(seen)
    yield target, "as it should be", good, ACCEPTED
    yield target, "relayed", to_bytes(DialbackAnswer("", NOT_TRIED, 0)), ACCEPTED
    yield target, "the end of time", good[:-8] + b"\xff" * 8, ACCEPTED
    yield target, "seen as nonsense", to_bytes(DialbackAnswer("/../../etc/passwd", NOT_TRIED, 0)), ACCEPTED
    yield target, "seen at port 65536", to_bytes(DialbackAnswer("/ip4/192.0.2.1/tcp/65536", ANSWERED, 0)), ACCEPTED
    yield target, "empty", b"", "Answer.seen: cut short"
    yield target, "less one", good[:-1], "Answer.milliseconds: cut short: 8 bytes wanted, 7 left"
    yield target, "and one", good + b"\0", "Answer has 1 bytes after its end"
    yield target, "outcome 3", put(good, outcome, b"\3"), "outcome 3"
    yield target, "outcome 255", put(good, outcome, b"\xff"), "outcome 255"
    yield target, "without an outcome", good[:outcome], "Answer.outcome: cut short"
    yield target, "seen of 64", sized_text(b"/" * 64) + good[outcome:], ACCEPTED
    yield target, "seen of 65", sized_text(b"/" * 65) + good[outcome:], "text of 65 characters, at most 64"
    yield target, "seen of 65535 and nothing", b"\xff\xff", "text of 65535 characters, at most 64"
    yield target, "seen longer than what came", put(good, 0, b"\x40\0"), "Answer.seen: cut short"
    for name, text in {"nul": b"\0", "space": b" ", "escape": b"\x1b[2J", "right to left": "\u202e".encode()}.items():
        yield target, f"seen with {name}", sized_text(text) + good[outcome:], "other than visible ASCII"
    for name, data in STRANGE.items():
        yield target, name, data, "Answer.seen: "


def _kept_labels() -> Iterator[Entry]:
    target, label = "kept label", Label(7, bytes(range(16)), 1, 3, 2, 1000)
    good = label.to_bytes()
    state = len(good) - SEAL_NBYTES - 8
    most = MOST_STRIPES * CHUNK_NBYTES * 2
    yield target, "as it should be", good, ACCEPTED
    yield target, "less one", good[:-1], "label of 50 bytes, want 51"
    yield target, "and one", good + b"\0", "label of 52 bytes, want 51"
    yield target, "the longest state", put(good, state, struct.pack("<Q", most)), ACCEPTED
    yield target, "a state too long", put(good, state, struct.pack("<Q", most + 1)), "label of a state of"
    yield target, "state 2**64-1", put(good, state, b"\xff" * 8), "a state of 18446744073709551615 bytes"
    yield target, "no state", put(good, state, bytes(8)), "a state of 0 bytes"
    yield target, "number is pieces", put(good, state - 3, b"\3"), "piece 3 of 3"
    yield target, "pieces 0", put(good, state - 2, b"\0"), "of 0, 2 needed"
    yield target, "pieces 33", put(good, state - 2, b"\x21"), "of 33, 2 needed"
    yield target, "needed 0", put(good, state - 1, b"\0"), "0 needed"
    yield target, "needed 4 of 3", put(good, state - 1, b"\4"), "4 needed"
    for name, data in STRANGE.items():
        yield target, name, data, "label of"


def _words() -> Iterator[Entry]:
    target = "words first message"
    point = bytes.fromhex("5866666666666666666666666666666666666666666666666666666666666666")  # the base point
    yield target, "as it should be", b"A" + point, ACCEPTED
    yield target, "the host's side", b"B" + point, "OffSides"
    yield target, "no side", b"C" + point, "OffSides"
    yield target, "less one", b"A" + point[:-1], "a first message of 32 bytes, want 33"
    yield target, "and one", b"A" + point + b"x", "a first message of 34 bytes, want 33"
    yield target, "neutral point", b"A" + b"\x01" + bytes(31), "a first message that is none"
    yield target, "point of order four", b"A" + bytes(32), "a first message that is none"
    yield target, "off the curve", b"A" + b"\x02" + bytes(31), "a first message that is none"
    yield target, "beyond the field", b"A" + b"\xff" * 32, "a first message that is none"
    target = "words"
    yield target, "as they should be", b"acid cargo mural tulip 4711", ACCEPTED
    yield target, "shouted", b"ACID-CARGO-MURAL-TULIP-4711", ACCEPTED
    yield target, "empty", b"", "0 of 5"
    yield target, "four", b"acid cargo mural 4711", "4 of 5"
    yield target, "unknown", b"acid cargo mural tulpi 4711", "perhaps tulip"
    yield target, "escape", b"acid cargo \x1b[2J tulip 4711", "is none of them"
    yield target, "number too small", b"acid cargo mural tulip 999", "is no number from 1000 to 9999"
    yield target, "a book", b"acid " * 10_000, "words: "


def controls() -> Iterator[Entry]:
    """Every entry of this file."""
    yield from _messages()
    yield from _leases()
    yield from _invites()
    yield from _dialbacks()
    yield from _kept_labels()
    yield from _words()
