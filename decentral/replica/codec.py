"""A fragment's pseudo-gradient to the bytes of a frame's body, and back.

What crosses the wire is the compressor's parts, entropy coded; it costs at most ``max_body_nbytes``. Sparse methods see
every parameter in its own shape (tiles need it), very many small ones together (``cut``); a reduce sees flat ranges, so
that it can be cut anywhere. Shapes and payloads are those of all channels in a row, the change first: ``channels`` says
how many they are.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate as accumulated
from typing import TypeVar

import torch
from numba.core.compiler_lock import global_compiler_lock
from torch import Tensor

from decentral.compressors import Compressor, Nothing, Payload, Uncompressed, parse_compressor, parse_feedback
from decentral.compressors.base import Decoded, add_flat, compress_flat, needs_matrices
from decentral.compressors.feedback import ErrorFeedback, Feedback, NoFeedback, State
from decentral.errors import PayloadError
from decentral.manifest import Manifest
from decentral.optimizers import compressor_beside, make_outer
from decentral.parameters import Fragment, split
from decentral.tensors.device import PROCESSOR, aside, move_together
from decentral.tensors.memory import fresh_zeros
from decentral.tensors.ops import is_finite
from decentral.wire import body

# Shape suffixes: N = elements of the fragment or range, flat float32; V = those that are not zero.

T = TypeVar("T")
Shapes = Sequence[tuple[int, ...]]
FixedShapes = tuple[tuple[int, ...], ...]  # of one channel: times the number of channels, those of a body
_SMALL = 70  # more than a tile
_UNTIL_AGAIN = 0.1  # s
_warm: set[str] = set()  # codecs that this process has warmed up


@dataclass(frozen=True, slots=True)
class Encoded:
    """The bytes to send, and the sender's feedback to book if, and only if, a commit names them."""

    body: bytes | memoryview
    feedback: dict[str, Tensor]  # but for what receivers keep of it, too: they book that, and it reads it there
    payloads: Sequence[Payload] = ()  # what the body holds, as every receiver reads it; () once nobody here needs it


@dataclass(frozen=True, slots=True)
class Codec:
    """A compressor with its feedback, applied to fragments."""

    compressor: Compressor
    feedback: Feedback = field(default_factory=NoFeedback)
    beside: Compressor | None = None  # of the channels beside the change, in a section of their own; None: the same

    def of(self, channel: int) -> Codec:
        """The codec of one channel by itself; the change is channel 0."""
        return self if channel == 0 or self.beside is None else replace(self, compressor=self.beside, beside=None)

    def cut(self, fragment: Fragment) -> FixedShapes:
        """Shapes of what a body over one channel of a fragment holds: of parameters, or of many small ones together,
        but where a compressor needs matrices.
        """
        needs = needs_matrices(self.compressor) or (self.beside is not None and needs_matrices(self.beside))
        return fragment.shapes if needs else fragment.pieces

    def max_body_nbytes(self, shapes: Shapes, channels: int = 1) -> int:
        """Return the most bytes that a body over ``shapes`` takes: known before a byte arrives."""
        return sum(body.max_nbytes(compressor, cut) for compressor, cut in self._sections(shapes, channels))

    def encode(self, change_N: Tensor, state: State, shapes: Shapes, states: Sequence[Tensor] = ()) -> Encoded:
        """Compress the change with what ``state``, this sender's feedback, remembers. Pure: neither is changed.

        ``states``: further channels (N,) that follow in the same body. They get no feedback: what compression loses
        of them is no progress that could be sent later, but how wrong they are now, and next time they are sent whole.

        Raises NonFiniteError when the change holds NaN or Inf. On a device all of
        it is done when this returns.
        """
        with aside(change_N.device):
            sending = self.feedback.send(self.compressor, change_N, state, shapes)
            others = [payload for one_N in states for payload in compress_flat(self.of(1).compressor, one_N, shapes)]
            payloads = _on_processor((*sending.payloads, *others))  # which waits for all of it
        own = {name: sending.state[name] for name in self.own_names}
        sections = self._sections(payloads, 1 + len(states))
        return Encoded(body.encode_sections(sections), own, payloads)

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of what a sender keeps for itself alone: receivers keep the others, too."""
        return tuple(name for name in self.feedback.sender if name not in self.feedback.receiver)

    def all_of(self, gradient_N: Tensor, state: State, shapes: Shapes) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what ``encode`` would send if compression lost nothing, and the feedback after it, for a step taken
        alone.

        Raises NonFiniteError when the gradient holds NaN or Inf.
        """
        sending = self.feedback.send(Uncompressed(), gradient_N, state, shapes)
        whole_N = torch.zeros_like(gradient_N)
        add_flat(Uncompressed(), whole_N, sending.payloads)
        return whole_N, sending.state

    def for_results(self) -> Codec:
        """Return the codec of the results of a reduce: under feedback of any kind their owners owe what it loses.

        Not by the senders' mechanism: the momentum of dgc would be applied twice, and a decay would forget what the
        contributors have struck off their own books.
        """
        return replace(self, feedback=ErrorFeedback(beta=1.0) if self.feedback.sender else NoFeedback())

    def unpack(self, data: bytes | memoryview, shapes: Shapes, channels: int = 1) -> Sequence[Payload]:
        """Return the payloads in the bytes. Raises PayloadError; what the parts mean is looked at when they are
        decompressed.
        """
        return body.decode_sections(self._sections(shapes, channels), data)

    def pieces(self, payloads: Sequence[Payload], channels: int = 1) -> Iterator[Tensor]:
        """Yield the tensor of each payload, one at a time. Raises PayloadError."""
        for compressor, section in self._sections(payloads, channels):
            for payload in section:
                (decoded,) = compressor.decompress([payload])
                yield decoded.tensor().to(torch.float32)

    def supports(
        self, payloads: Sequence[Payload], decoded: Sequence[Decoded]
    ) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Yield by payload the places (V,) in the whole change, and the values there, all others being zero; None where
        one does not say it. ``decoded``: what the payloads decompress to.
        """
        starts = accumulated((math.prod(payload.shape) for payload in payloads), initial=0)
        for one, start in zip(decoded, starts, strict=False):
            found = one.support()
            if found is None:
                yield None
            else:
                place_V, value_V = found
                yield (place_V + start if start else place_V), value_V.to(torch.float32).contiguous()

    def decompress(self, payloads: Sequence[Payload], channels: int = 1) -> Tensor:
        """The flat float32 tensor that every receiver of these applies. Raises PayloadError."""
        if len(payloads) == 1:  # as a reduce sees it, for instance: no need to copy
            decoded_N = next(self.pieces(payloads, channels)).flatten().contiguous()
        else:
            shapes = [payload.shape for payload in payloads]
            decoded_N = fresh_zeros(numel(shapes))
            for decoded, piece in zip(split_shapes(decoded_N, shapes), self.pieces(payloads, channels), strict=True):
                decoded.copy_(piece)
        if not is_finite(decoded_N):  # a second guard: one NaN in a mean would reach every peer
            raise PayloadError(f"body decodes to NaN or Inf through {self.compressor}; drop it and its sender")
        return decoded_N

    def check(self, payloads: Sequence[Payload]) -> None:
        """Raise PayloadError unless each decompresses to finite values."""
        if not all(map(is_finite, self.pieces(payloads))):
            raise PayloadError(f"body decodes to NaN or Inf through {self.compressor}; drop it and its sender")

    def decode(self, data: bytes | memoryview, shapes: Shapes, channels: int = 1) -> Tensor:
        """``decompress`` of what the bytes hold. Raises PayloadError."""
        return self.decompress(self.unpack(data, shapes, channels), channels)

    def add(self, total_N: Tensor, payloads: Sequence[Payload], weight: float = 1.0) -> None:
        """``total += weight * decompress(payloads)`` in place: sparse frames touch only what they hold.

        Raises PayloadError; ``total`` is then to be thrown away.
        """
        shapes = [payload.shape for payload in payloads]
        if numel(shapes) != total_N.numel():
            raise PayloadError(f"body of {numel(shapes)} values where {total_N.numel()} are added; drop it")
        add_flat(self.compressor, total_N, payloads, weight)

    def warm_up(self) -> None:
        """Compile what encoding and decoding need, so that the first round does not wait for it: some seconds on a
        machine that never did, half a second later.
        """
        if repr(self) in _warm:
            return
        _warm.add(repr(self))
        shapes = ((_SMALL, _SMALL), (_SMALL,))
        ramp_N = torch.linspace(-1, 1, numel(shapes), dtype=torch.float32, device="cpu")
        encoded = self.encode(ramp_N, {}, shapes)
        self.add(self.decode(encoded.body, shapes), self.unpack(encoded.body, shapes))
        if self.beside is not None:
            self.of(1).warm_up()

    def _sections(self, all_of_them: Sequence[T], channels: int) -> list[tuple[Compressor, Sequence[T]]]:
        """Shapes or payloads of so many channels, by the compressor that they have in a body."""
        if self.beside is None or channels == 1:
            return [(self.compressor, all_of_them)]
        each = len(all_of_them) // channels
        return [(self.compressor, all_of_them[:each]), (self.beside, all_of_them[each:])]


# ---- machine code, beside what goes on ----
#
# The first time on a machine a sparse run's takes some 20 s, which a person would wait for. Nothing is used half
# compiled: whoever needs a function meanwhile waits at numba's lock, and compiles it by itself.


class WarmUp(threading.Thread):
    """``Codec.warm_up`` on a thread of its own, from now on."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(name="warm-up", daemon=True)
        self._codec = codec
        self._error: BaseException | None = None
        self.start()

    def is_over(self) -> bool:
        """Tell whether a round would wait for no machine code any more; raises what a method's own code raised."""
        if self._error is not None:
            raise self._error
        return not self.is_alive()

    def run(self) -> None:
        """Compile, until the process ends."""
        atexit.register(self._give_up)
        try:
            self._codec.warm_up()
        except _GivenUp:
            return
        except BaseException as error:  # noqa: BLE001  told where the peer asks
            self._error = error
        atexit.unregister(self._give_up)

    def _give_up(self) -> None:
        """End amid a function, which takes seconds: the compiler must not run while the interpreter is taken down
        under it, and whoever pressed Ctrl-C does not wait for it.
        """
        hook = sys.unraisablehook  # where it comes in one of LLVM's calls back, which lets nothing through
        sys.unraisablehook = lambda ignored: None if ignored.exc_type is _GivenUp else hook(ignored)
        while self.is_alive():  # once may not do: numba itself may be handling an error of its own
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(_GivenUp))
            self.join(_UNTIL_AGAIN)


def _release_compiler() -> None:
    global_compiler_lock.release()


# A worker that is forked while the thread compiles would hold numba's lock for ever: a fork waits for the function.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=global_compiler_lock.acquire, after_in_parent=_release_compiler, after_in_child=_release_compiler
    )


class _GivenUp(SystemExit):
    """Nobody needs the rest. As a SystemExit it ends a thread without a word, wherever it comes."""


def _on_processor(payloads: Sequence[Payload]) -> tuple[Payload, ...]:
    """The payloads as every receiver reads them: what a device left of a tensor crosses here."""
    if all(payload.device == PROCESSOR for payload in payloads):
        return tuple(payloads)
    parts = iter(move_together([part for payload in payloads for part in payload.parts], PROCESSOR))
    return tuple(Payload(payload.shape, tuple(next(parts) for _ in payload.parts)) for payload in payloads)


def split_shapes(flat_N: Tensor, shapes: Shapes) -> list[Tensor]:
    """Views of the flat tensor in the given shapes, in order."""
    return split(flat_N, shapes)


def range_shapes(start: int, stop: int) -> FixedShapes:
    """A flat range, as a reduce sees it."""
    return ((stop - start,),)


def numel(shapes: Shapes) -> int:
    """Elements over all shapes."""
    return sum(math.prod(shape) for shape in shapes)


# ---- the codec that a manifest asks for ----


def codec_of(manifest: Manifest) -> Codec:
    """The codec of a run's contributions: the chain, its feedback, and what compresses the states.

    Channels whose own compressor is the run's are in one section with the change, as those that have none.
    """
    method = make_outer(manifest.outer.method, manifest.outer.hyper)
    if method.summary.rebuilds:
        return Codec(Nothing())
    chain = parse_compressor(manifest.compressor.chain)
    own = compressor_beside(method.channels())
    beside = chain if own is None else parse_compressor(own)
    feedback = parse_feedback(manifest.compressor.feedback)
    return Codec(chain, feedback, None if str(beside) == str(chain) else beside)
