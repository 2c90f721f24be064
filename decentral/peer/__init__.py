"""Taking part in a run from a PyTorch training loop, or following it.

Each name is imported when it is first asked for: the command line reads join's options in this package without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decentral.node.follower import Anchor
    from decentral.peer.following import Following, follow
    from decentral.peer.joining import fetch_manifest, join
    from decentral.peer.peer import Peer

__all__ = ["Anchor", "Following", "Peer", "fetch_manifest", "follow", "join"]

_HOMES = {
    "decentral.node.follower": ("Anchor",),
    "decentral.peer.following": ("Following", "follow"),
    "decentral.peer.joining": ("fetch_manifest", "join"),
    "decentral.peer.peer": ("Peer",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these

    def __getattr__(name: str) -> object:  # PEP 562
        """Import a public name when it is first used, and keep it."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(_HOME[name]), name)
        return value
