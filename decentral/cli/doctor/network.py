"""What ``decentral doctor`` says of this machine's network: both kinds of IP, UDP, port mapping, how far relays are."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence

from decentral.cli.findings import Finding
from decentral.transport.native.tcp import endpoint

_ABROAD = {  # set aside for documentation: nobody's
    "ipv4": (socket.AF_INET, "192.0.2.1"),
    "ipv6": (socket.AF_INET6, "2001:db8::1"),
}
_PATIENCE = 5.0  # s for a relay to take a connection

Source = Callable[[socket.AddressFamily, str], str]


def source_of(family: socket.AddressFamily, host: str) -> str:
    """The address that this machine would send to ``host`` from; nothing is sent. OSError when there is no way."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def network(relays: Sequence[str], source: Source = source_of) -> Iterator[Finding]:
    """Lines as network checkers of other tools have them; what this project does not use is said, too."""
    found = {name: _way(source, *where) for name, where in _ABROAD.items()}
    for name, address in found.items():
        other = any(one for kind, one in found.items() if kind != name)
        if address:
            yield Finding("ok", name, f"leaves from {address}")
        elif other:
            yield Finding("ok", name, "no way out; the other kind has one, and peers of this kind alone need a relay")
        else:
            yield Finding(
                "warn", name, "no way out: this machine meets peers of its own network only; check its router"
            )
    yield Finding("ok", "udp", "not used: peers speak TCP, so nothing is to be opened for UDP but mDNS at home (5353)")
    yield Finding(
        "ok",
        "mapping",
        "not asked for: no router is told to open a port (UPnP, NAT-PMP); forward one by hand, or name a relay",
    )
    yield Finding("ok", "hairpin", "not needed: peers behind one router meet by their private addresses")
    for relay in relays:
        yield _distance(relay)


def _way(source: Source, family: socket.AddressFamily, host: str) -> str:
    try:
        return source(family, host)
    except OSError:
        return ""


def _distance(relay: str) -> Finding:
    """One way there and back, by the time that TCP takes to connect."""
    at = relay.partition("/p2p/")[0]
    where = endpoint(at)
    if where is None:
        return Finding("warn", "relay", f"{at} cannot be dialled by TCP; ask its operator for a /tcp/ address")
    began = time.monotonic()
    try:
        with socket.create_connection(where, timeout=_PATIENCE):
            return Finding("ok", "relay", f"{at} answers in {1000 * (time.monotonic() - began):.0f} ms")
    except OSError as error:
        reason = error.strerror or "no answer"
        return Finding("warn", "relay", f"{at} does not answer ({reason}); is it up? Name another one beside it")
