"""Addresses as text and as the daemon's bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.errors import PayloadError
from decentral.transport.protocols.messages import multiaddr_to_bytes, multiaddr_to_text, read_varint, varint

NAME = "12D3KooWBcyagbReKdZjbmdE9RANx3o3EfH7YuqBmU8ickmnyoFz"
NAME_HEX = "1acc72098fff0b34109d530bc35b1f9c1570f992acac48a13b03befd4bdde32d"


@pytest.mark.parametrize(
    ("text", "packed"),
    [
        ("/ip4/1.2.3.4/tcp/5", "0401020304060005"),
        ("/ip6/::1/tcp/4", "2900000000000000000000000000000001060004"),
        ("/dns4/a.b/tcp/5", "3603612e62060005"),
        ("/ip4/1.2.3.4/udp/5/quic-v1", "040102030491020005cd03"),
        (f"/p2p/{NAME}", "a50326002408011220" + NAME_HEX),
        (f"/ip4/1.2.3.4/tcp/5/p2p/{NAME}/p2p-circuit", "0401020304060005a50326002408011220" + NAME_HEX + "a202"),
    ],
)
def test_golden_addresses_are_the_same_both_ways(text, packed):
    assert multiaddr_to_bytes(text).hex() == packed
    assert multiaddr_to_text(bytes.fromhex(packed)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rubbish",
        "/",
        "/ip4",
        "/ip4/1.2.3",
        "/ip4/1.2.3.4/tcp",
        "/ip4/1.2.3.4/tcp/65536",
        "/ip4/1.2.3.4/tcp/-1",
        "/dns4//tcp/1",
        "/dns4/ä/tcp/1",
        "/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "/unix/tmp/x",
        "/ip4/1.2.3.4/tcp/5" * 100,
    ],
)
def test_text_that_leads_to_no_peer_is_a_payload_error(text):
    with pytest.raises(PayloadError):
        multiaddr_to_bytes(text)


@given(st.binary(max_size=80))
def test_any_bytes_are_an_address_or_a_payload_error(packed):
    try:
        text = multiaddr_to_text(packed)
    except PayloadError:
        return
    assert multiaddr_to_text(multiaddr_to_bytes(text)) == text if text else packed == b""


@given(st.integers(0, 2**35 - 1), st.binary(max_size=3))
def test_varints_come_back_and_say_where_they_end(number, rest):
    packed = varint(number)
    assert read_varint(packed + rest) == (number, len(packed))


def test_a_varint_without_an_end_is_a_payload_error():
    for packed in (b"", b"\x80", b"\xff" * 5 + b"\x01"):
        with pytest.raises(PayloadError):
            read_varint(packed)
