"""The text of a run on its way to who joins without it: in chunks by their digests, from all members at once.

The terms hold the size of the text and the digest of the list of its chunks' digests. So a member that lies is known by
the first thing that it sends, and how much there is to take follows from the terms and never from the wire. A chunk is
on the disk as soon as it is checked: after a kill only those that are missing are asked for.

Crosses the wire: an empty question is answered with the list, 32 bytes a chunk; the number of a chunk, u32, with a
form, one byte, and the chunk in it, of 256 KiB but the last: 0 as it is, 1 as a zstd frame where that is shorter.
Members answer as they answer who fetches a snapshot: behind their own frames, and within their caps.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import anyio

from decentral.coding import zstd
from decentral.dissemination.pull import fetch_chunks, in_own_order
from decentral.errors import DecentralError, PayloadError, TransportError
from decentral.flow.waiting import Offload, in_thread
from decentral.manifest.terms import SharedText
from decentral.state.durable import disk_errors
from decentral.state.snapshot import CHUNK_NBYTES, HASH_NBYTES, chunk_hash
from decentral.transport import Transport
from decentral.transport.requests import request, serve_requests
from decentral.wire.keys import PeerId

TEXT = "/decentral/text/1"
NUMBER = struct.Struct("<I")
FORM_NBYTES = 1  # ahead of a chunk
TIMEOUT = 30.0  # s until an answer begins: the first who asks waits until the giver has digested all of its text
_SILENT = 5.0  # s until another is asked for the list, too
GIVERS = 16  # peers that one text is fetched from
_PLAIN, _PACKED = 0, 1
_DOMAIN = b"decentral text 1\n"
_SIZE = struct.Struct("<Q")

# ---- the list of chunks ----


def chunks_in(nbytes: int) -> int:
    """Return how many chunks a text of so many bytes has."""
    return -(-nbytes // CHUNK_NBYTES)


def chunk_nbytes(number: int, nbytes: int) -> int:
    """Return the exact size of a chunk of a text of ``nbytes``: only the last one is short."""
    return min(CHUNK_NBYTES, nbytes - number * CHUNK_NBYTES)


def list_chunks(pieces: Iterable[bytes | memoryview]) -> bytes:
    """Return the digests of the chunks, in a row, of a text that comes in pieces of any size."""
    return b"".join(map(chunk_hash, _recut(pieces)))


def _recut(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    left = bytearray()
    for piece in pieces:
        left += piece
        while len(left) >= CHUNK_NBYTES:
            yield bytes(left[:CHUNK_NBYTES])
            del left[:CHUNK_NBYTES]
    if left:
        yield bytes(left)


def list_digest(digests: bytes, nbytes: int) -> str:
    """Return the name of a list, in hex, for the terms."""
    return blake2b(_DOMAIN + _SIZE.pack(nbytes) + digests, digest_size=HASH_NBYTES).hexdigest()


# ---- what a member gives ----


class TextDonor:
    """The text that a member trains on, for who joins. Memory: the list alone, made when it is first asked for."""

    def __init__(self, transport: Transport, shared: SharedText, *, offload: Offload = in_thread) -> None:
        self.text = memoryview(b"")  # nothing is given before whoever trains has set it, from any thread
        self._shared, self._offload = shared, offload
        self._list, self._is_shared = b"", False  # the latter: its digest is that of the terms
        self._making, self._packing = anyio.Lock(), anyio.Lock()
        serve_requests(transport, TEXT, self.answer, limit=NUMBER.size)

    async def answer(self, peer: PeerId, data: bytes) -> bytes:
        """Answer with the list, or with the chunk that is asked for. Raises PayloadError, TransportError."""
        if not data:
            return await self._digests()
        if len(data) != NUMBER.size:
            raise PayloadError(f"a question for text of {len(data)} bytes, want {NUMBER.size} or none; drop it")
        (number,) = NUMBER.unpack(data)
        if number >= chunks_in(len(self.text)):
            raise PayloadError(f"chunk {number} asked for, the text has {chunks_in(len(self.text))}")
        await self._digests()
        async with self._packing:  # 4 ms a chunk, aside: of the threads of a round it takes one
            return await self._offload(to_form, bytes(self._chunk(number)))

    async def _digests(self) -> bytes:
        """Return the list. Raises TransportError where it is not that of the terms: nothing of such a text is given."""
        async with self._making:
            if self.text and not self._list:
                self._list = await self._offload(self._list_own)
                self._is_shared = list_digest(self._list, len(self.text)) == self._shared.chunks
        if not self._is_shared:
            raise TransportError("this peer's text is not the one whose chunks the terms name; ask another peer")
        return self._list

    def _list_own(self) -> bytes:
        return list_chunks(map(self._chunk, range(chunks_in(len(self.text)))))

    def _chunk(self, number: int) -> memoryview:
        return self.text[number * CHUNK_NBYTES : (number + 1) * CHUNK_NBYTES]


def to_form(chunk: bytes) -> bytes:
    """Return the chunk in its shorter form."""
    packed = zstd.write_text_frame(chunk)
    return bytes([_PACKED]) + packed if len(packed) < len(chunk) else bytes([_PLAIN]) + chunk


def from_form(answer: bytes, nbytes: int) -> bytes:
    """Return the chunk, of ``nbytes``. Raises PayloadError; whether it is the right one, its digest says."""
    form, body = answer[:FORM_NBYTES], answer[FORM_NBYTES:]
    if form == bytes([_PACKED]) and len(body) < nbytes:
        return zstd.read_frame(body, nbytes)
    if form != bytes([_PLAIN]) or len(body) != nbytes:
        raise PayloadError(f"a chunk of {nbytes} bytes of text came as {len(answer)} in no form that is known; drop it")
    return body


# ---- what is here of it ----


class TextFile:
    """The text on the disk, as far as it came. Memory: the digests; one chunk at a time."""

    def __init__(self, path: Path, digests: bytes, nbytes: int) -> None:
        """Begin, or go on with what ``path`` holds: each of its chunks is checked again. Raises DiskError."""
        self.path, self.nbytes, self._digests = path, nbytes, digests
        self._have = set[int]()
        with disk_errors(f"preparing {path}"), path.open("r+b" if path.exists() else "w+b") as file:
            for number in range(self.num_chunks):
                file.seek(number * CHUNK_NBYTES)
                if self._is_right(number, file.read(chunk_nbytes(number, nbytes))):
                    self._have.add(number)
            os.ftruncate(file.fileno(), nbytes)  # sparse: reserves the name, not the space

    @property
    def num_chunks(self) -> int:
        """Return the number of its chunks."""
        return chunks_in(self.nbytes)

    @property
    def here(self) -> int:
        """Return the bytes that are here."""
        return min(self.nbytes, CHUNK_NBYTES * len(self._have))

    def missing(self) -> list[int]:
        """Return the numbers of the chunks still to fetch, in order."""
        return [number for number in range(self.num_chunks) if number not in self._have]

    def add(self, number: int, data: bytes) -> None:
        """Write a chunk. Raises PayloadError, with nothing written, for what is not it; DiskError."""
        if not self._is_right(number, data):
            raise PayloadError(f"chunk {number} of the text is not what the terms name; ask another peer")
        with disk_errors(f"writing {self.path}"), self.path.open("r+b") as file:
            file.seek(number * CHUNK_NBYTES)
            file.write(data)
        self._have.add(number)

    def _is_right(self, number: int, data: bytes) -> bool:
        begin = number * HASH_NBYTES
        return bool(data) and chunk_hash(data) == self._digests[begin : begin + HASH_NBYTES]


# ---- fetching it ----


class TextFetch:
    """The asking side of who joins. ``told`` hears how far it is: bytes that are here, peers that gave some of them.

    A peer that sent something else than the terms name is asked no more, and ``dropped`` hears why; one that failed
    may be asked again in the next ``run``, after all others.
    """

    def __init__(
        self,
        transport: Transport,
        shared: SharedText,
        path: Path,
        *,
        told: Callable[[int, int], None],
        dropped: Callable[[PeerId, str], None],
        offload: Offload = in_thread,
    ) -> None:
        self._transport, self._shared, self._path, self._offload = transport, shared, path, offload
        self._told, self._dropped = told, dropped
        self._file: TextFile | None = None  # when the list is here
        self._liars, self._failed, self._gave = set[PeerId](), Counter[PeerId](), set[PeerId]()

    @property
    def here(self) -> int:
        """Return the bytes that are here."""
        return 0 if self._file is None else self._file.here

    async def run(self, peers: Callable[[], Sequence[PeerId]]) -> None:
        """Return when all of it is at ``path``; ``peers()`` says who may be asked now, and is called again and again.

        Raises TransportError when nobody gives more, and DiskError: what came is kept.
        """
        if self._file is None:
            digests = await self._find_list(self._honest(peers))
            self._file = await self._offload(TextFile, self._path, digests, self._shared.nbytes)
        self._tell()
        await fetch_chunks(self._file, self._ask, lambda: self._honest(peers), self._drop)
        self._tell()

    async def _find_list(self, givers: Sequence[PeerId]) -> bytes:
        """Return the right list: of one peer after another, without waiting for long for one that is silent."""
        found = list[bytes]()

        async def ask(peer: PeerId, ended: anyio.Event) -> None:
            try:
                found.append(await self._ask_list(peer))
                group.cancel_scope.cancel()
            except (TransportError, PayloadError) as error:
                self._drop(peer, error)
            ended.set()

        async with anyio.create_task_group() as group:
            for peer in givers:
                ended = anyio.Event()
                group.start_soon(ask, peer, ended)
                with anyio.move_on_after(_SILENT):
                    await ended.wait()
        if not found:
            raise TransportError("nobody who has the run's text answers; ask again")
        return found[0]

    async def _ask_list(self, peer: PeerId) -> bytes:
        digests = await self._request(peer, b"", HASH_NBYTES * chunks_in(self._shared.nbytes))
        if list_digest(digests, self._shared.nbytes) != self._shared.chunks:
            raise PayloadError("a list of chunks that the terms do not name; ask another peer")
        return digests

    async def _ask(self, peer: PeerId, number: int) -> bytes:
        nbytes = chunk_nbytes(number, self._shared.nbytes)
        chunk = from_form(await self._request(peer, NUMBER.pack(number), nbytes + FORM_NBYTES), nbytes)
        self._gave.add(peer)
        del self._failed[peer]
        self._tell()
        return chunk

    async def _request(self, peer: PeerId, question: bytes, limit: int) -> bytes:
        return await request(self._transport, peer, TEXT, question, limit=limit, timeout=TIMEOUT)

    def _tell(self) -> None:
        assert self._file is not None, "after the list"
        self._told(self.here, len(self._gave))

    def _honest(self, peers: Callable[[], Sequence[PeerId]]) -> list[PeerId]:
        """Return whom to ask: those that failed last, or as many of them would be in the way of all others."""
        honest = (peer for peer in peers() if peer not in self._liars)
        me = self._transport.peer
        return sorted(honest, key=lambda peer: (self._failed[peer], in_own_order(me, peer)))[:GIVERS]

    def _drop(self, peer: PeerId, error: DecentralError) -> None:
        self._gave.discard(peer)
        self._failed[peer] += 1
        if isinstance(error, PayloadError):
            self._liars.add(peer)
            self._dropped(peer, str(error))
