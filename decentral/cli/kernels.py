"""Machine code for a run's compressor, compiled before training begins: once on a machine, for 5 to 20 s."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from decentral.manifest import Manifest

DENSE, SPARSE = 25, 95  # functions that int8 needs, and topk >> signmag2; what needs fewer is done sooner


def compile_for(manifest: Manifest, stream: IO[str]) -> None:
    """What was compiled before is loaded in half a second, and nothing is said."""
    from decentral.cli.shown.countdown import Countdown
    from decentral.replica.codec import codec_of

    codec = codec_of(manifest)
    expected = SPARSE if ">>" in manifest.compressor.chain else DENSE
    countdown = Countdown(stream, what="compiling machine code, once on this machine")
    with countdown, _compiled(lambda count: countdown(min(1.0, count / expected))):
        codec.warm_up()


@contextmanager
def _compiled(on_count: Callable[[int], None]) -> Iterator[None]:
    """Tell how many functions numba has compiled since the block began, after each."""
    from numba.core import event

    class Counter(event.Listener):  # type: ignore[misc]  # numba has no types
        count = 0

        def on_start(self, event: object) -> None:
            """See Listener."""

        def on_end(self, event: object) -> None:
            """See Listener."""
            self.count += 1
            on_count(self.count)

    with event.install_listener("numba:compile", Counter()):
        yield
