"""What a peer alone has, out of its checkpoints: given to members to keep, and had back once the disk is lost.

That is the inner optimizer, the scheduler, random generators, the method's own, the count of inner steps, and buffers
where each peer has its own. The anchor, the outer state and shared buffers the swarm has. The debt and the live model's
lead stay behind: commits since then may have taken from them, and what was taken must not be sent again. So a peer
that lost its disk goes on as one that slept through rounds, and its live model begins at the anchor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decentral.errors import ConfigError, PayloadError
from decentral.manifest import Redundancy
from decentral.node.node import Node
from decentral.peer.saved.checkpointing import Taken
from decentral.redundancy.giver import packed, unpacked
from decentral.redundancy.recovery import Recovered, Recovery, RedundancyService
from decentral.state.snapshot import live_buffer_name
from decentral.training.live_side import OWN
from decentral.training.swarm_side import SwarmThread
from decentral.wire.keys import peer_name

KEYS = ("inner_steps", "training", "progress", "buffers", "schema", "parameters")  # of a checkpoint's document
LOOK_EVERY = 0.2  # s: Ctrl-C must get through while pieces come

Announce = Callable[[str, dict[str, object]], None]

logger = logging.getLogger("decentral.peer")


@dataclass(frozen=True, slots=True)
class OwnState:
    """Tensors and document as a checkpoint has them, without what is not the peer's alone."""

    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]  # Any: JSON

    @classmethod
    def of(cls, taken: Taken) -> OwnState:
        """That of a checkpoint."""
        kinds = ("training/", OWN, *([live_buffer_name("")] if taken.meta["buffers"] == "own" else []))
        tensors = {name: tensor for name, tensor in taken.tensors.items() if name.startswith(kinds)}
        return cls(tensors, {key: taken.meta[key] for key in KEYS})


class OwnStateKept:
    """Gives the state of a checkpoint to others, once in so many seconds."""

    def __init__(
        self,
        swarm: SwarmThread[Node],
        terms: Redundancy,
        announce: Announce,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._swarm, self._seconds, self._announce, self._clock = swarm, terms.seconds, announce, clock
        self._given_at = clock()  # a state that is just begun, or restored, is not worth the bytes

    def after(self, taken: Taken) -> None:
        """A checkpoint is durable; on the thread that wrote it."""
        service, now = self._swarm.node.redundancy, self._clock()
        if service is None or service.giver.is_busy or now - self._given_at < self._seconds:
            return
        self._given_at = now
        own = OwnState.of(taken)
        round_ = int(taken.meta.get("gossip_step") or taken.head.outer_step)
        self._swarm.tell(self._give, service, packed(own.tensors, own.meta), round_)

    async def _give(self, service: RedundancyService, state: bytes, round_: int) -> None:
        given = await service.giver.give(state, round_)
        if given is None:
            return
        if given.why:
            self._announce("state_not_given", {"round": round_, "why": given.why})
            return
        names, seconds = [peer_name(peer) for peer in given.keepers], round(given.seconds, 3)
        self._announce("state_given", {"round": round_, "peers": names, "bytes": given.nbytes, "seconds": seconds})


def recovered(swarm: SwarmThread[Node], restore: Callable[[OwnState], None], announce: Announce) -> OwnState | None:
    """What members keep of this peer, once ``restore`` has put it back; None, and all as before, where that fails."""
    service = swarm.node.redundancy
    if service is None:
        return None
    began, recovery = time.monotonic(), service.recovery()
    found, why = _searched(swarm, recovery), recovery.why
    try:
        if found is not None:
            own = OwnState(*unpacked(found.state))
            restore(own)
            _tell(found, time.monotonic() - began, announce)
            return own
    except (PayloadError, ConfigError) as error:
        why = str(error)
    announce("state_not_restored", {"why": why})
    logger.warning("no checkpoint is here, and the inner optimizer's state did not come back: %s; it begins anew", why)
    return None


def _searched(swarm: SwarmThread[Node], recovery: Recovery) -> Recovered | None:
    search = swarm.begin(recovery.run)
    while not wait([search], LOOK_EVERY).done:
        pass
    return search.result()


def _tell(found: Recovered, seconds: float, announce: Announce) -> None:
    names, nbytes = [peer_name(peer) for peer in found.keepers], len(found.state)
    announce("state_restored", {"round": found.round, "peers": names, "bytes": nbytes, "seconds": round(seconds, 3)})
    logger.warning(
        "no checkpoint is here; the inner optimizer's state of round %d came back from %d peers, %.1f MB in %.1f s",
        found.round,
        len(names),
        nbytes / 1e6,
        seconds,
    )
