"""What a peer says, and whom it still serves, once its training loop has come to its own end."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

from decentral.errors import NoPeersError
from decentral.peer.gathering import LOOK_EVERY
from decentral.peer.participation import Participation
from decentral.training.processes import TO_MEET, Orders

PLAIN = {"plain": True}  # of a log line that is no complaint, and that a display shows without a word before it

logger = logging.getLogger("decentral.peer")


def end_as_one(orders: Orders | None, kind: type[BaseException] | None) -> bool:
    """Whether there is to be a last checkpoint: not after an error, and all processes of the peer are here for it.

    ``kind``: what ended the training loop; None: it came to its own end. After Ctrl-C one process may be inside what
    another has left, and waits for it: then the checkpoint before has to do. The others give their part from here.
    """
    interrupted = kind is KeyboardInterrupt
    if kind not in (None, KeyboardInterrupt, NoPeersError) or (orders is not None and orders.over):
        return False
    if orders is None:
        return True
    if orders.processes.is_main:
        return not interrupted or orders.meet()
    with suppress(TimeoutError):
        orders.follow(within=TO_MEET if interrupted else None)
    return True


def end_of_run(part: Participation, asked_to_leave: threading.Event) -> None:
    """The run is over: how to have it, and, where that was wished, a stay for those who come late."""
    out = part.settings.called
    logger.info("This run is over: decentral export %s --to model/", out, extra=PLAIN)
    if part.settings.options.keep_serving:
        until = "until Ctrl-C, or decentral leave --out"
        logger.info("its last state can be had here %s %s", until, out, extra=PLAIN)
        with suppress(KeyboardInterrupt):
            while not asked_to_leave.wait(LOOK_EVERY) and part.swarm.alive:
                pass


def end_before_the_run(part: Participation) -> None:
    """The loop ended by itself while the run goes on: often a script that counts its own steps."""
    made = f"{part.swarm.node.outer_steps} of {part.settings.manifest.run.rounds} rounds"
    logger.warning("left after %s; the run goes on without this peer; loop until peer.done", made, extra=PLAIN)
