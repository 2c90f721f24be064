"""How a chunk of a snapshot travels: as it is, or by planes through zstd where that is shorter.

Crosses the wire: the form, one byte, then the chunk in it. A chunk's name stays the hash of its plain bytes. How many
these are follows from the local layout, so nothing is expanded beyond it.
"""

from decentral.coding import zstd
from decentral.errors import PayloadError

PLAIN, PLANES = 0, 1
BY_PLANES = 1 << 0  # in an asker's set of forms, one byte: this one may come, too. Bits without a meaning are ignored
HEAD_NBYTES = 1


def to_form(chunk: bytes, forms: int) -> bytes:
    """The chunk in the shortest form that the asker takes."""
    if forms & BY_PLANES:
        packed = zstd.pack(chunk)
        if len(packed) < len(chunk):
            return bytes([PLANES]) + packed
    return bytes([PLAIN]) + chunk


def from_form(answer: bytes, nbytes: int) -> bytes:
    """The chunk, of ``nbytes``. Raises PayloadError; whether it is the right one, its hash says."""
    if not answer or answer[0] not in (PLAIN, PLANES):
        raise PayloadError(f"a chunk in form {answer[:1].hex() or 'none'}, which nobody asked for; drop the donor")
    body = answer[HEAD_NBYTES:]
    packed = answer[0] == PLANES
    if packed and nbytes % 4:
        raise PayloadError(f"a chunk of {nbytes} bytes by planes of four; drop the donor")
    if len(body) >= nbytes if packed else len(body) != nbytes:
        raise PayloadError(f"a chunk of {nbytes} bytes came as {len(body)}; drop the donor")
    return zstd.unpack(body, nbytes) if packed else body
