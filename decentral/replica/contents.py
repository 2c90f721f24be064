"""The contents of frames, read from their bytes once: payloads, buffers, norms; and what is kept of their senders."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decentral.compressors import Payload
from decentral.compressors.base import AddBand, Decoded
from decentral.compressors.feedback import State
from decentral.errors import NonFiniteError, PayloadError
from decentral.parameters import BufferSpec, Schema, first_non_finite
from decentral.replica.codec import Codec, FixedShapes
from decentral.replica.measures import Measure, Measures
from decentral.tensors.ops import float32, is_finite
from decentral.wire.frames import Frame, FrameKind, Header
from decentral.wire.keys import PEER_NBYTES, Digest, PeerId
from decentral.wire.messages import MAX_PEERS, Record

__all__ = [
    "CAPACITY",
    "ENOUGH",
    "GATHERED",
    "MAKERS",
    "NO_TAIL",
    "FrameContents",
    "Kept",
    "Payloads",
    "Readings",
    "Senders",
    "Tail",
    "Unpacked",
    "carriers",
    "is_of_sender",
    "median_of_owners",
    "nbytes_of",
    "sender_name",
]

# Shape suffixes: N = elements of one fragment, B = elements of all buffers, K = contributors; flat float32.

# ---- payloads of the open round ----
#
# Gathered frames are checked, measured and added from the same parts.
#
# Kept for as long as the round is open, of each sender the newest frame of a round, and within so many bytes: a sparse
# contribution to 31 million parameters takes 1.5 MB, and 2 more decoded. What found no room is read again. What was
# measured stays longer.

CAPACITY = 1 << 26  # bytes, of the 256 MiB for frames: most of a round's, where sparse ones take a hundredth of it each
_LONGER = 2  # times its payloads may be what is kept of what they decode to: top-k's with two bits is 1.3
GATHERED = (FrameKind.CONTRIBUTION, FrameKind.MERGE)  # what every peer adds up itself

Payloads = Sequence[Payload]


class Unpacked:
    """Payloads by round and sender, and what they decode to where that is as short. Called from the threads that
    decode.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity, self.nbytes, self.measures = capacity, 0, Measures()
        self._kept: dict[tuple[int, PeerId], tuple[bytes, Payloads]] = {}  # with the frame's hash
        self._decoded: dict[tuple[int, PeerId], tuple[bytes, Sequence[Decoded], int]] = {}  # of those, with its bytes
        self._lock = threading.Lock()

    def get(self, frame: Frame) -> Payloads | None:
        """Return the payloads of a frame, while they are kept."""
        hash_, payloads = self._kept.get(_key(frame), (b"", ()))
        return payloads if hash_ == frame.hash else None

    def add(self, frame: Frame, payloads: Payloads) -> bool:
        """Keep what a frame holds; False when there is no room for it, even without those of rounds before its own."""
        with self._lock:
            self._drop(_key(frame))
            for past in sorted(key for key in self._kept if key[0] < frame.header.round):
                if self._fits(payloads):
                    break
                self._drop(past)
            if not self._fits(payloads):
                return False
            self._kept[_key(frame)] = frame.hash, payloads
            self.nbytes += nbytes_of(payloads)
            return True

    def keep_decoded(self, frame: Frame, decoded: Sequence[Decoded]) -> None:
        """Keep what a frame's change decodes to, if its payloads are kept and it is not much longer than they are: the
        outer step need not decode it again. It takes half of the room at most, for payloads go before it.
        """
        sizes = [one.nbytes for one in decoded]
        nbytes = sum(size or 0 for size in sizes)
        with self._lock:
            hash_, payloads = self._kept.get(_key(frame), (b"", ()))
            is_short = None not in sizes and nbytes <= _LONGER * nbytes_of(payloads)
            if hash_ == frame.hash and is_short and self.nbytes + nbytes <= self.capacity // 2:
                self._drop_decoded(_key(frame))
                self._decoded[_key(frame)] = frame.hash, decoded, nbytes
                self.nbytes += nbytes

    def decoded(self, frame: Frame) -> Sequence[Decoded]:
        """Return what a frame's change decodes to, while that is kept; () else."""
        hash_, decoded, _ = self._decoded.get(_key(frame), (b"", (), 0))
        return decoded if hash_ == frame.hash else ()

    def forget_before(self, round_: int) -> None:
        """Drop what is of rounds before ``round_``."""
        with self._lock:
            for key in [key for key in self._kept if key[0] < round_]:
                self._drop(key)

    def _fits(self, payloads: Payloads) -> bool:
        return self.nbytes + nbytes_of(payloads) <= self.capacity

    def _drop(self, key: tuple[int, PeerId]) -> None:
        _, payloads = self._kept.pop(key, (b"", ()))
        self.nbytes -= nbytes_of(payloads)
        self._drop_decoded(key)

    def _drop_decoded(self, key: tuple[int, PeerId]) -> None:
        self.nbytes -= self._decoded.pop(key, (b"", (), 0))[2]


def nbytes_of(payloads: Payloads) -> int:
    """Return the memory that their parts take."""
    return sum(part.nbytes for payload in payloads for part in payload.parts)


def _key(frame: Frame) -> tuple[int, PeerId]:
    return frame.header.round, frame.header.sender


# ---- what peers of one process read of the same frames ----
#
# A simulation has hundreds of peers, and each frame comes to all of them.
#
# A frame's hash covers its header and body, and the schema and the codec are the run's, so what one peer has read of a
# frame, and found to be as it should, is what every other would read. Parts are shared and never written to.

KEPT_READINGS = 2048  # frames: two rounds of the largest membership


class Readings:
    """The newest frames', by hash: the payloads of a body that is in order, and what was measured of it."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[Payloads, Measure | None]] = OrderedDict()

    def get(self, frame: bytes) -> tuple[Payloads, Measure | None] | None:
        """Return what was read of a frame, while it is remembered."""
        return self._known.get(frame)

    def add(self, frame: bytes, payloads: Payloads, measure: Measure | None) -> None:
        """Remember what was read of a frame."""
        self._known[frame] = payloads, measure
        if len(self._known) > KEPT_READINGS:
            self._known.popitem(last=False)


# ---- a model's buffers, behind the body ----
#
# BatchNorm's running means, for instance.
#
# Crosses the wire: little-endian float32, in the schema's order, after what the compressor wrote, under the same hash
# and signature. They ride with fragment 0: on contributions, on slices and results of up to ``MAKERS`` parts, on both
# halves of a pair, and on what gossip merges in the end. No length is read: the local schema gives it.
#
# They are not compressed, for an error in a running variance is not averaged away. That costs 4 bytes a value, and
# buffers are few; a mask as large as the context is better registered with ``persistent=False``.
#
# A sender may say anything. From ``ENOUGH`` contributors on each value is shortened to where the others have it:
#
# median - r <= value <= median + r      r = max(floor, c * 1.4826 * MAD), c = 10 of three contributors, 5 of more
#
# 1.4826 MAD is the standard deviation of Gaussian values. Of honest ones the mean is then off by 1.018, 1.008, 1.011
# and 1.003 times the plain mean's error (root mean square, Gaussian, of 3, 4, 5 and 6 contributors; 1.00 of 8 to 64),
# and by 0.86 to 1.00 times where tails are heavier (Student's t with 3 degrees of freedom, Laplace). Of three the MAD
# is the smaller of two gaps, hence the larger c. Values are not dropped: what one of five says, whatever it is, moves
# the mean by 1.3 standard deviations of the others on average. The floor is for those that agree to the last bit.
#
# In a reduce the owners make the buffers. What only one of them says nobody could check, so up to ``MAKERS`` do it of
# the same slices and to the same bits, and each value is the lower median of what they say. Two have no majority:
# where they differ, what is nearer to the buffers before counts.

MAKERS = 5  # parts of a reduce that carry buffers: two lying owners of five change nothing
ENOUGH = 3  # contributors from which on a median tells who is far off
_NEAR, _NEAR_OF_THREE = 5.0, 10.0  # c
_SIGMA = 1.4826
_FLOOR, _LEAST = 2.0**-10, 1e-6  # of the median, and of anything
_BAND = 1 << 16  # values that are sorted at once: of 1,024 contributors half a gigabyte
_FLOAT = np.dtype("<f4")
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]  # (K, b) of some contributors, b values of a band


@dataclass(frozen=True, slots=True)
class Tail:
    """The part of the buffers that crosses. Without any, as where each peer keeps its own, frames have no tail."""

    buffers: tuple[BufferSpec, ...] = ()
    numel: int = 0
    takes_first: bool = False  # what the first contributor has, instead of the mean

    @classmethod
    def of(cls, schema: Schema, policy: str) -> Tail:
        """``policy``: average, first or own, as the manifest says."""
        shared = policy != "own"
        return cls(schema.buffers if shared else (), schema.buffer_numel if shared else 0, policy == "first")

    def nbytes(self, fragment: int, part: int = 0, parts: int = 1) -> int:
        """Bytes behind the body of a frame."""
        return 4 * self.numel if fragment == 0 and part in carriers(parts) else 0

    def nbytes_of(self, header: Header) -> int:
        """The same for a frame with this header."""
        return self.nbytes(header.fragment, header.part, header.parts)

    def pack(self, buffers_B: Tensor) -> bytes:
        """The bytes that tell these buffers; none where nothing crosses. NonFiniteError names one with NaN or Inf."""
        if not self.numel:
            return b""
        if (culprit := first_non_finite(buffers_B, self.buffers)) is not None:
            raise NonFiniteError(
                f"NaN or Inf in the buffer {culprit}; nothing was sent: lower the learning rate, or, where it belongs "
                'there (a mask), register it with persistent=False or set buffers = "own" in [model]'
            )
        return buffers_B.numpy().astype(_FLOAT).tobytes()

    def split(self, frame: Frame) -> tuple[memoryview, Tensor | None]:
        """Return what the compressor wrote, and the sender's buffers (B,) if the frame carries them. Raises
        PayloadError.
        """
        body, nbytes = frame.body, self.nbytes_of(frame.header)
        if not nbytes:
            return body, None
        if len(body) < nbytes:
            raise PayloadError(f"body of {len(body)} bytes, its buffers alone take {nbytes}; drop it and its sender")
        return body[:-nbytes], self.unpack(body[-nbytes:])

    def unpack(self, tail: bytes | memoryview) -> Tensor:
        """The buffers (B,) that these bytes tell, new. Raises PayloadError."""
        tail_B = torch.from_numpy(np.frombuffer(tail, _FLOAT).astype(np.float32))
        if not is_finite(tail_B):
            raise PayloadError("buffers with NaN or Inf; drop the frame and its sender")
        return tail_B

    def read_record(
        self, record: Record, frames: Mapping[Digest, Frame], before_B: Tensor
    ) -> tuple[list[memoryview], Tensor | None]:
        """Return what the compressor wrote into each frame that a record names, and what the buffers become; None: they
        stay.

        Of a reduce its owners have merged them. ``before_B``: the shared ones so far.
        """
        opened = [(ref, *self.split(frames[ref.frame])) for ref in record.frames]
        by_sender: dict[PeerId, Tensor] = {}
        for ref, _, tail_B in sorted(opened, key=lambda one: (one[0].peer, one[0].part)):
            if tail_B is not None:
                by_sender.setdefault(ref.peer, tail_B)  # an owner of several parts has one say
        tails = list(by_sender.values())
        merged = None if not tails else median_of_owners(tails, before_B) if record.contributors else self.merge(tails)
        return [body for _, body, _ in opened], merged

    def pack_merge(self, tails: Sequence[Tensor]) -> bytes:
        """The tail that tells what the contributors' buffers become; none where they told none."""
        return self.pack(self.merge(tails)) if tails else b""

    def merge(self, tails: Sequence[Tensor]) -> Tensor:
        """Merge the contributors' buffers (B,), given in the order of their ids: the same bits on every peer.

        Each value is first shortened to where the others have it. The mean counts all alike, whatever
        ``outer.weighting`` says; summed in float64, so that it is finite. Counters are rounded, half to even; of other
        whole numbers it is the lower median, which is what somebody has.
        """
        value_KB = np.stack([tail_B.numpy() for tail_B in tails])
        merged_B = np.empty(self.numel, dtype=np.float32)
        for start in range(0, self.numel, _BAND):
            near_Kb = _clip_to_median(value_KB[:, start : start + _BAND].astype(np.float64))
            merged_B[start : start + _BAND] = near_Kb[0] if self.takes_first else _mean(near_Kb)
        at = 0
        for spec in self.buffers:
            piece = slice(at, at := at + spec.numel)
            if not spec.has_mean:
                merged_B[piece] = self._somebodys(value_KB[:, piece], merged_B[piece])
            elif spec.kind == "integer":
                merged_B[piece] = merged_B[piece].round()
        return torch.from_numpy(merged_B)

    def _somebodys(self, value_Kn: Floats, merged_n: Floats) -> Floats:
        """Merge whole numbers that have no mean: the first's as long as it was not shortened, or the lower median."""
        middle_n: Floats = np.sort(value_Kn, axis=0)[(len(value_Kn) - 1) // 2]
        return np.where(value_Kn[0] == merged_n, merged_n, middle_n) if self.takes_first else middle_n


def carriers(parts: int) -> set[int]:
    """The parts, of so many, whose slices and results carry buffers: evenly spread, as a peer's own lie in a row."""
    count = min(MAKERS, parts)
    return {number * parts // count for number in range(count)}


def median_of_owners(told: Sequence[Tensor], before_B: Tensor) -> Tensor:
    """Give what the owners of a reduce say of the buffers (B,), value by value: the lower median; of two the nearer one
    to what was before.
    """
    told_KB = torch.stack(list(told)).double() + 0.0  # of a zero without a sign: no sort tells -0.0 and 0.0 apart
    if len(told) == 2:
        off_KB = (told_KB - before_B.double()).abs()
        return torch.where(off_KB[1] < off_KB[0], told[1], told[0])
    return told_KB.sort(dim=0).values[(len(told) - 1) // 2].to(torch.float32)


def _clip_to_median(value_Kb: Doubles) -> Doubles:
    """Each value, brought near to the median of all; of fewer than ``ENOUGH`` as it is."""
    if len(value_Kb) < ENOUGH:
        return value_Kb
    middle_b = _median(value_Kb)
    spread_b = _median(np.abs(value_Kb - middle_b))
    near = _NEAR_OF_THREE if len(value_Kb) == ENOUGH else _NEAR
    reach_b = np.maximum(near * _SIGMA * spread_b, _FLOOR * np.abs(middle_b) + _LEAST)
    return np.clip(value_Kb, middle_b - reach_b, middle_b + reach_b)


def _median(value_Kb: Doubles) -> Doubles:
    """The mean of the middle two where they are even in number."""
    sorted_Kb, count = np.sort(value_Kb, axis=0), len(value_Kb)
    middle_b: Doubles = (sorted_Kb[(count - 1) // 2] + sorted_Kb[count // 2]) / 2
    return middle_b


def _mean(value_Kb: Doubles) -> Doubles:
    """Added row by row: the same bits everywhere."""
    total_b = np.zeros(value_Kb.shape[1], dtype=np.float64)
    for value_b in value_Kb:
        total_b += value_b
    return total_b / len(value_Kb)


NO_TAIL = Tail()


# ---- gathered frames, by channel ----
#
# Payloads, norms and sketches, and sums of them. Where there is no room to keep what frames hold, it is here of one
# frame at a time.


@dataclass(frozen=True, slots=True)
class FrameContents:
    """The contents of one run's contributions and merges."""

    schema: Schema
    codec: Codec
    merge_codec: Codec  # of the merge that ends a gossip run
    tail: Tail
    unpacked: Unpacked = field(default_factory=Unpacked)

    def payloads(self, frame: Frame) -> Payloads:
        """All that a frame holds, read again when that is not kept. Raises PayloadError."""
        known = self.unpacked.get(frame)
        if known is not None:
            return known
        body, _ = self.tail.split(frame)
        made = self._codec_of(frame).unpack(body, self._shapes(frame) * frame.header.channels, frame.header.channels)
        self.unpacked.add(frame, made)
        return made

    def channel(self, frame: Frame, channel: int) -> Sequence[Payload]:
        """The payloads of one channel; the change is channel 0."""
        each = len(self._shapes(frame))
        return self.payloads(frame)[channel * each : (channel + 1) * each]

    def change(self, frame: Frame) -> Tensor:
        """The change (N,), as all decode it."""
        return self.codec.decompress(self.channel(frame, 0))

    def nonzero(self, frames: Sequence[Frame], numel: int) -> Tensor:
        """Where one of the changes has a value, bool (N,)."""
        moved_N = torch.zeros(numel, dtype=torch.bool, device="cpu")
        for frame in frames:
            moved_N |= self.change(frame) != 0
        return moved_N

    def measure(self, frame: Frame) -> Measure:
        """The change's norm and sketch, made again when they are not known. Raises PayloadError."""
        known = self.unpacked.measures.get(frame.hash)
        if known is not None:
            return known
        made, decoded = Measure.of_payloads(self.codec, self.channel(frame, 0))
        self.unpacked.keep_decoded(frame, decoded)
        return self.unpacked.measures.add(frame.hash, made)

    def add(self, frame: Frame, channel: int, scale: float, total_N: Tensor, weight: float) -> None:
        """``total += weight * scale * what the channel holds``, in place."""
        self._codec_of(frame).of(channel).add(total_N, self.channel(frame, channel), _scale_weight(scale, weight))

    def band_adders(self, frame: Frame, scale: float, these: slice) -> list[AddBand]:
        """Return functions that add some tensors of a contribution's change in bands."""
        known = self.unpacked.decoded(frame)[these]
        decoded = known or self.codec.compressor.decompress(self.channel(frame, 0)[these])
        return [_scale_add(one.add, scale) for one in decoded]

    def _shapes(self, frame: Frame) -> FixedShapes:
        return self.codec.cut(self.schema.fragments[frame.header.fragment])

    def _codec_of(self, frame: Frame) -> Codec:
        return self.merge_codec if frame.header.kind == FrameKind.MERGE else self.codec


def _scale_add(add: AddBand, scale: float) -> AddBand:
    return lambda start, total_n, weight: add(start, total_n, _scale_weight(scale, weight))


def _scale_weight(scale: float, weight: float) -> float:
    return weight if scale == 1.0 else float32(weight * scale)  # two float32 make an exact float64: rounded once


# ---- what every receiver keeps of each sender ----
#
# Under ef21 and econtrol it is the sum of what was sent, alike on all peers.
#
# It belongs to the anchor: snapshots and checkpoints hold it, and only commits change it. A sender keeps no copy of
# its own. What it takes the others to hold of it is what they hold, whatever was passed by, given up or adopted
# meanwhile. Of a peer that is no member any more nothing is kept: it is as long as the model for each member, and no
# longer. Who comes back starts anew, and everybody with it.

_PREFIX = "senders/"
Kept = dict[PeerId, State]


class Senders:
    """The tensors kept, by fragment and sender. They are replaced, never written to."""

    def __init__(self, names: tuple[str, ...], sizes: Sequence[int]) -> None:
        """``names``: of what receivers keep, none under most mechanisms; ``sizes``: elements of each fragment."""
        self.names, self.sizes = names, tuple(sizes)
        self._kept: list[Kept] = [{} for _ in self.sizes]

    def of(self, fragment: int, peer: PeerId) -> State:
        """Return what is kept of a sender; {} before its first contribution."""
        return self._kept[fragment].get(peer, {})

    def book(self, fragment: int, states: Mapping[PeerId, State]) -> None:
        """Keep what a commit left of its contributors."""
        self._kept[fragment] = {**self._kept[fragment], **states}

    def keep_only(self, members: Collection[PeerId]) -> None:
        """Drop what is kept of everybody else: a record set a new membership."""
        self._kept = [{peer: state for peer, state in kept.items() if peer in members} for kept in self._kept]

    # ---- what a checkpoint or a snapshot holds ----

    @property
    def nbytes(self) -> int:
        """Return the bytes that all of it takes."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by the names of a snapshot."""
        return {
            sender_name(f, peer, name): tensor
            for f, kept in enumerate(self._kept)
            for peer, state in kept.items()
            for name, tensor in state.items()
        }

    def read_tensors(self, tensors: Mapping[str, Tensor]) -> list[Kept]:
        """Return what is kept of senders here. PayloadError for a name or a size that cannot be, or for too many."""
        found: list[dict[PeerId, dict[str, Tensor]]] = [{} for _ in self.sizes]
        for key in filter(is_of_sender, tensors):
            fragment, peer, name = self._place(key)
            tensor = tensors[key]
            if tensor.shape != (self.sizes[fragment],) or not tensor.is_floating_point() or tensor.element_size() != 4:
                raise PayloadError(f"{key} of shape {tuple(tensor.shape)}, want ({self.sizes[fragment]},) of float32")
            found[fragment].setdefault(peer, {})[name] = tensor
        for kept in found:
            if len(kept) > MAX_PEERS or any(set(state) != set(self.names) for state in kept.values()):
                raise PayloadError(f"state of {len(kept)} senders, or of one by halves; use another donor")
        return [dict(kept) for kept in found]

    def take_over(self, found: Sequence[Kept]) -> None:
        """Hold what was ``found``, and nothing else."""
        self._kept = list(found)

    def _place(self, key: str) -> tuple[int, PeerId, str]:
        """Fragment, sender and name. PayloadError where this run has no such thing."""
        fragment, peer, name = [*key.removeprefix(_PREFIX).split("/"), "", "", ""][:3]
        known = {str(f): f for f in range(len(self.sizes))}
        try:
            sender = bytes.fromhex(peer)
        except ValueError:
            sender = b""
        if fragment not in known or name not in self.names or key != sender_name(known[fragment], sender, name):
            raise PayloadError(f"state holds {key[:120]!r}, which no receiver of this run keeps; use another donor")
        if len(sender) != PEER_NBYTES:
            raise PayloadError(f"state of a sender whose id has {len(sender)} bytes; use another donor")
        return known[fragment], sender, name


def sender_name(fragment: int, peer: PeerId, name: str) -> str:
    """Name of what is kept of one sender. They sort behind all others, so that those stay in the same chunks."""
    return f"{_PREFIX}{fragment}/{peer.hex()}/{name}"


def is_of_sender(name: str) -> bool:
    """Tell whether a tensor of a checkpoint or a snapshot is kept of some sender."""
    return name.startswith(_PREFIX)
