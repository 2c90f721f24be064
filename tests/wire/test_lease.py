"""A lease is its peer's word, whoever carries it."""

import dataclasses

import pytest

from decentral.errors import PayloadError
from decentral.wire.keys import Signer
from decentral.wire.messages import Lease, decode, encode, seal_lease

SIGNER = Signer(bytes(32))
PLAIN = Lease(
    run=bytes(32),
    peer=SIGNER.peer,
    sequence=5,
    ttl=15,
    addresses=("/ip4/127.0.0.1/tcp/4001", "/ip6/::1/udp/4001/quic-v1"),
    epoch=1,
    round=2,
    digest=bytes([3] * 32),
    state=1,
    uplink=20_000_000,
    version="0.1.0",
)


def test_a_sealed_lease_is_read_back() -> None:
    lease = seal_lease(PLAIN, SIGNER)
    assert decode(encode(lease)) == lease


def test_no_single_changed_bit_of_a_lease_passes() -> None:
    data = encode(seal_lease(PLAIN, SIGNER))
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        with pytest.raises(PayloadError):
            decode(bytes(changed))


def test_an_unsigned_lease_cannot_be_sent() -> None:
    with pytest.raises(PayloadError, match="not signed by the peer it names"):
        encode(PLAIN)


def test_a_peer_signs_its_own_lease_only() -> None:
    stranger = Signer(bytes([1] * 32))
    with pytest.raises(PayloadError, match="its own lease only"):
        seal_lease(PLAIN, stranger)
    forged = dataclasses.replace(seal_lease(dataclasses.replace(PLAIN, peer=stranger.peer), stranger), peer=SIGNER.peer)
    with pytest.raises(PayloadError, match="not signed"):
        encode(forged)


@pytest.mark.parametrize(
    "changes",
    [
        {"addresses": ("/ip4/1.2.3.4/tcp/1",) * 17},
        {"addresses": ("/" + "a" * 256,)},
        {"addresses": ("/ip4/\x1b[2J",)},
        {"addresses": ("/dns4/ä",)},
        {"version": "v" * 33},
        {"version": "0.1\n"},
        {"ttl": 2**32},
        {"state": 256},
        {"uplink": -1},
    ],
)
def test_a_lease_that_breaks_a_bound_cannot_be_signed(changes: dict[str, object]) -> None:
    with pytest.raises(PayloadError, match="Lease"):
        seal_lease(dataclasses.replace(PLAIN, **changes), SIGNER)  # type: ignore[arg-type]
