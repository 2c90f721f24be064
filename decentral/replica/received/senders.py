"""What every receiver keeps of each sender, alike on all peers: under ef21 and econtrol the sum of what it sent.

It belongs to the anchor: snapshots and checkpoints hold it, and only commits change it. A sender keeps no copy of its
own. What it takes the others to hold of it is what they hold, whatever was passed by, given up or adopted meanwhile.
Of a peer that is no member any more nothing is kept: it is as long as the model for each member, and no longer. Who
comes back starts anew, and everybody with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from decentral.compressors.feedback import State
from decentral.errors import PayloadError
from decentral.wire.keys import PeerId
from decentral.wire.messages import MAX_PEERS

_PREFIX = "senders/"
_PEER_NBYTES = 32
Kept = dict[PeerId, State]


class Senders:
    """By fragment and sender. Tensors are replaced, never written to."""

    def __init__(self, names: tuple[str, ...], sizes: Sequence[int]) -> None:
        """``names``: of what receivers keep, none under most mechanisms; ``sizes``: elements of each fragment."""
        self.names, self.sizes = names, tuple(sizes)
        self._kept: list[Kept] = [{} for _ in self.sizes]

    def of(self, fragment: int, peer: PeerId) -> State:
        """What is kept of a sender; {} before its first contribution."""
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
        """What all of it takes."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """All of it, by the names of a snapshot."""
        return {
            sender_name(f, peer, name): tensor
            for f, kept in enumerate(self._kept)
            for peer, state in kept.items()
            for name, tensor in state.items()
        }

    def found(self, tensors: Mapping[str, Tensor]) -> list[Kept]:
        """What these tensors hold of senders. PayloadError for a name or a size that cannot be, or for too many."""
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
        if len(sender) != _PEER_NBYTES:
            raise PayloadError(f"state of a sender whose id has {len(sender)} bytes; use another donor")
        return known[fragment], sender, name


def sender_name(fragment: int, peer: PeerId, name: str) -> str:
    """Name of what is kept of one sender. They sort behind all others, so that those stay in the same chunks."""
    return f"{_PREFIX}{fragment}/{peer.hex()}/{name}"


def is_of_sender(name: str) -> bool:
    """Whether a tensor of a checkpoint or a snapshot is kept of some sender."""
    return name.startswith(_PREFIX)
