"""Taking part in a run from a PyTorch training loop."""

from decentral.peer.joining import fetch_manifest, join
from decentral.peer.peer import Peer

__all__ = ["Peer", "fetch_manifest", "join"]
