"""``hivemind.Optimizer`` with local updates, as its configuration guide says; the knob is steps a peer and epoch.

From the guide: averaging in the background with the delta rule (its defaults for local updates), state averaged as
float16, 3 to 5 s of matchmaking for few peers, and a time-out of about twice an all-reduce, with room for a slow line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from experiments.contestants.loop import Entered, adamw
from experiments.contestants.seat import Seat
from experiments.contestants.terms import BATCH_SIZE

MATCHMAKING = 5.0  # s
TIMEOUT = 30.0  # s


@contextmanager
def enter(seat: Seat, model: nn.Module) -> Iterator[Entered]:
    """The first peer's DHT is the others' way in."""
    import hivemind

    bootstrap = [] if seat.first else seat.await_text("address").split()
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{seat.address}/tcp/0"], initial_peers=bootstrap, start=True)
    if seat.first:
        seat.hand_out("address", " ".join(map(str, dht.get_visible_maddrs())))
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="contest",
        params=model.parameters(),
        optimizer=adamw,
        use_local_updates=True,
        batch_size_per_step=BATCH_SIZE,
        target_batch_size=BATCH_SIZE * seat.match.peers * int(seat.match.knob),
        state_averaging_compression=hivemind.compression.Float16Compression(),
        matchmaking_time=MATCHMAKING,
        averaging_timeout=TIMEOUT,
        verbose=True,
    )
    if seat.late:
        optimizer.load_state_from_peers()
    yield Entered(model, optimizer)
