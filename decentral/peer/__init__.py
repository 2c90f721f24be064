"""Taking part in a run from a PyTorch training loop."""

from decentral.peer.peer import Peer, fetch_manifest, join

__all__ = ["Peer", "fetch_manifest", "join"]
