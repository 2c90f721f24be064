"""Taking part in a run from a PyTorch training loop, or following it."""

from decentral.node.follower import Anchor
from decentral.peer.following import Following, follow
from decentral.peer.joining import fetch_manifest, join
from decentral.peer.peer import Peer

__all__ = ["Anchor", "Following", "Peer", "fetch_manifest", "follow", "join"]
