"""A small internet of network namespaces: a public core, households behind gateways, hosts in them.

    with Lab() as lab:
        relay = lab.public("relay")
        home = lab.household("home", PORT_PRESERVING, Line(up=20, down=100, delay=0.0125))
        alice = home.host("alice")
        alice.run("ping", "-c", "1", relay.v4)

Nothing of it can reach the machine's own network, nor be reached from there. Addresses of household N: 45.67.N.2 for
all the world, 10.N.0.0/24 at home, 100.64.N.0/24 between its own gateway and a carrier's, 2a02:45:67:N::/64 in IPv6.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.natlab.flows import HOME_TABLE, TABLE, V4, V6_HOME, V6_LINE, Flow, read_flows, read_home
from tests.natlab.namespaces import LabError, Namespace, Traveller
from tests.natlab.nat import Nat
from tests.natlab.wires import Line, Wire

IPV4 = frozenset({4})
IPV6 = frozenset({6})
DUAL = frozenset({4, 6})
_MOST = 200  # households
_FORGETTING = 5.0  # s for the kernel to forget an address that is gone


class Lab:
    """The core and whatever is joined to it, while the block lasts."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._traveller = stack.enter_context(Traveller())
            self.core = self.namespace("core")
            _forward(self.core)
            self.core.nft(TABLE)
            self._number = 0
            self.at_home: list[Host] = []
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def namespace(self, name: str) -> Namespace:
        """A network of its own, joined to nothing yet."""
        return self._traveller.make(name)

    def public(self, name: str, line: Line | None = None, families: frozenset[int] = IPV4) -> Host:
        """A host with a public address and nothing in front of it."""
        number, namespace = self._next(), self.namespace(name)
        wire = self._wire(namespace, number, line or Line(), families)
        v4 = _at(V4, number, 2) if 4 in families else None
        v6 = _at(V6_LINE, number, 2) if 6 in families else None
        return Host(name, namespace, number, wire, v4, v6)

    def household(
        self,
        name: str,
        nat: Nat,
        line: Line | None = None,
        families: frozenset[int] = IPV4,
        carrier: Nat | None = None,
    ) -> Household:
        """A gateway of this kind and a network behind it; ``carrier``: another gateway before the internet."""
        number, gateway = self._next(), self.namespace(f"gateway of {name}")
        _forward(gateway)
        gateway.nft(nat.rules())
        outermost = gateway
        if carrier is not None:
            outermost = self._carrier(gateway, number, carrier)
        wire = self._wire(outermost, number, line or Line(), families)
        if 6 in families:
            self.core.ip(f"route add {_net(V6_HOME, number)} via {_at(V6_LINE, number, 2)}")
        return Household(self, name, number, gateway, wire, families)

    def flows(self) -> Counter[Flow]:
        """Bytes so far between households, and within each."""
        found = read_flows(self.core)
        for host in self.at_home:
            found[host.number, host.number, "home"] += read_home(host)
        return found

    def _next(self) -> int:
        assert self._number < _MOST, "household numbers are one byte of an address"
        self._number += 1
        return self._number

    def _wire(self, home: Namespace, number: int, line: Line, families: frozenset[int]) -> Wire:
        wire = Wire(self.core, home, number, line)
        self._stack.callback(wire.end)
        for version, net in ((4, V4), (6, V6_LINE)):
            if version in families:
                near, far = _at(net, number, 2), _at(net, number, 1)
                length, quick = net.rpartition("/")[2], " nodad" if version == 6 else ""
                self.core.ip(f"addr add {far}/{length} dev {wire.far}{quick}")
                home.ip(f"addr add {near}/{length} dev wan{quick}", f"route add default via {far}")
        return wire

    def _carrier(self, gateway: Namespace, number: int, nat: Nat) -> Namespace:
        """A second gateway, whose customer the first one is (RFC 6598's addresses between them)."""
        carrier, inner, outer = self.namespace(f"{gateway.name}, carrier"), f"100.64.{number}.2", f"100.64.{number}.1"
        _forward(carrier)
        carrier.nft(nat.rules())
        carrier.ip(f"link add lan type veth peer name wan netns {gateway.path}", "link set lan up")
        carrier.ip(f"addr add {outer}/24 dev lan")
        gateway.ip("link set wan up", f"addr add {inner}/24 dev wan", f"route add default via {outer}")
        return carrier


class Household:
    """A gateway and the hosts behind it."""

    def __init__(
        self, lab: Lab, name: str, number: int, gateway: Namespace, wire: Wire, families: frozenset[int]
    ) -> None:
        self.name, self.number, self.gateway, self.wire, self.families = name, number, gateway, wire, families
        self.public_v4 = _at(V4, number, 2) if 4 in families else None
        self._lab, self._hosts = lab, 0
        gateway.ip("link add lan type bridge", "link set lan up")
        if 4 in families:
            gateway.ip(f"addr add 10.{number}.0.1/24 dev lan")
        if 6 in families:
            gateway.ip(f"addr add {_at(V6_HOME, number, 1)}/64 dev lan nodad")

    def host(self, name: str) -> Host:
        """One more machine at home."""
        self._hosts += 1
        namespace, last = self._lab.namespace(name), 10 + self._hosts
        port = f"port{self._hosts}"
        self.gateway.ip(
            f"link add {port} type veth peer name eth0 netns {namespace.path}", f"link set {port} master lan up"
        )
        namespace.ip("link set eth0 up")
        v4 = f"10.{self.number}.0.{last}" if 4 in self.families else None
        v6 = _at(V6_HOME, self.number, last) if 6 in self.families else None
        if v4:
            namespace.ip(f"addr add {v4}/24 dev eth0", f"route add default via 10.{self.number}.0.1")
        if v6:
            via = _at(V6_HOME, self.number, 1)
            namespace.ip(f"addr add {v6}/64 dev eth0 nodad", f"route add default via {via}")
        namespace.nft(HOME_TABLE.format(number=self.number, v6=_net(V6_HOME, self.number)))
        host = Host(name, namespace, self.number, self.wire, v4, v6)
        self._lab.at_home.append(host)
        return host

    def renumber(self, last: int = 3) -> str:
        """The provider gives out another address: what was mapped to the old one is gone. Returns the new one."""
        assert self.public_v4 is not None, "only IPv4 addresses change here"
        old, self.public_v4 = self.public_v4, _at(V4, self.number, last)
        self.wire.home.ip(
            f"addr del {old}/24 dev wan",
            f"addr add {self.public_v4}/24 dev wan",
            f"route replace default via {_at(V4, self.number, 1)}",
        )
        _until_forgotten(self.wire.home, old)
        return self.public_v4


class Host(Namespace):
    """A machine: a namespace with addresses, in household ``number``."""

    def __init__(
        self, name: str, namespace: Namespace, number: int, wire: Wire, v4: str | None, v6: str | None
    ) -> None:
        super().__init__(namespace.traveller, name, namespace.descriptor)
        self.number, self.wire, self.v4, self.v6 = number, wire, v4, v6


def _forward(namespace: Namespace) -> None:
    namespace.sysctl("net/ipv4/ip_forward", 1)
    namespace.sysctl("net/ipv6/conf/all/forwarding", 1)


def _until_forgotten(gateway: Namespace, address: str) -> None:
    """The kernel drops the mappings of an address that goes, but a moment later."""
    end, nobody = time.monotonic() + _FORGETTING, threading.Event()
    while f"={address} " in gateway.do(lambda: Path("/proc/thread-self/net/nf_conntrack").read_text()):
        if time.monotonic() > end:
            raise LabError(f"{gateway.name}: still maps to {address} after {_FORGETTING:g} s without it")
        nobody.wait(0.01)


def _net(pattern: str, number: int) -> str:
    return pattern.format(f"{number:x}" if ":" in pattern else number)


def _at(pattern: str, number: int, last: int) -> str:
    net = _net(pattern, number).partition("/")[0]
    return f"{net}{last:x}" if ":" in net else f"{net.removesuffix('0')}{last}"
