"""How a daemon takes part in the network, and as whom: what it is told when it is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from decentral.wire.keys import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """How the daemon takes part in the network."""

    announce: tuple[str, ...] = ()  # addresses to tell others instead of those found
    relays: tuple[str, ...] = ()  # one address per relay that may carry this peer's streams
    reachability: Literal["public", "private"] | None = None  # None: found out by asking others
    nat_port_map: bool = False  # ask the router to open a port (UPnP, NAT-PMP)
    dial_timeout: float = 10.0  # s, for open, connect and every request to the daemon
    start_timeout: float = 60.0  # s; 0.1 s is usual, a laden machine may take a hundred times that
    watcher: bool | None = None  # see transport.child.launched

    @property
    def wants_a_place(self) -> bool:
        """Whether nobody can dial this peer but through a relay."""
        return bool(self.relays) and self.reachability == "private"

    def flags(self) -> list[str]:
        """The daemon's command line, but for key, addresses and socket."""
        flags = ["-dhtServer=1", "-connManager=1", "-autonat=1", "-relay=1", "-relayDiscovery=0", "-tls=1"]
        flags.append(f"-natPortMap={int(self.nat_port_map)}")
        if self.reachability is not None:
            flags.append(f"-forceReachability{self.reachability.capitalize()}=1")
        if self.announce:
            flags.append(f"-announceAddrs={','.join(self.announce)}")
        if self.relays:
            flags += ["-autoRelay=1", f"-trustedRelays={','.join(self.relays)}"]
        return flags


class KeyFile(Protocol):
    """A libp2p private key file and whose it is: ``decentral.swarm.identity.Identity`` is one."""

    @property
    def path(self) -> Path:
        """The file the daemon reads."""
        ...

    @property
    def peer(self) -> PeerId:
        """The Ed25519 public key in it."""
        ...
