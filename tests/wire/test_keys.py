"""Keys: signatures hold for one key and one text only, and names are libp2p's."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from decentral.errors import PayloadError
from decentral.wire.keys import Signer, is_sound, peer_from_name, peer_name, verify

FIELD = 2**255 - 19
GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493
IDENTITY_KEY = (1).to_bytes(32, "little")


def test_a_signature_holds_for_its_key_and_text_only() -> None:
    alice, bob = Signer(bytes(32)), Signer(bytes([1] * 32))
    signature = alice.sign(b"text")
    assert verify(alice.peer, signature, b"text")
    assert not verify(bob.peer, signature, b"text")
    assert not verify(alice.peer, signature, b"texts")


def test_the_first_key_of_rfc_8032_gives_its_public_key_and_signature() -> None:
    signer = Signer(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    assert signer.peer.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert signer.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155")


def test_a_signature_with_the_group_order_added_is_refused() -> None:
    signer = Signer(bytes(32))
    signature = signer.sign(b"text")
    scalar = int.from_bytes(signature[32:], "little") + GROUP_ORDER
    assert not verify(signer.peer, signature[:32] + scalar.to_bytes(32, "little"), b"text")


def test_keys_of_small_order_are_refused_although_anybody_can_sign_for_them() -> None:
    forged = IDENTITY_KEY + bytes(32)  # R = identity, S = 0: right for every text under the identity key
    Ed25519PublicKey.from_public_bytes(IDENTITY_KEY).verify(forged, b"any text")
    assert not verify(IDENTITY_KEY, forged, b"any text")


SMALL_ORDER = [  # of the eight points: the names without the bit of the sign, as libsodium lists them
    bytes(32),
    IDENTITY_KEY,
    (FIELD - 1).to_bytes(32, "little"),
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
]


def test_the_eight_points_of_small_order_are_refused() -> None:
    for name in SMALL_ORDER:
        assert not is_sound(name)
        assert not is_sound(name[:-1] + bytes([name[-1] | 0x80]))
    assert is_sound(Signer(bytes(32)).peer)


@pytest.mark.parametrize("y", range(FIELD, 2**255))
def test_a_key_beyond_the_field_is_refused(y: int) -> None:
    assert not is_sound(y.to_bytes(32, "little"))


@given(st.binary(max_size=70), st.binary(max_size=70), st.binary(max_size=40))
@settings(max_examples=100, deadline=None)
def test_verify_never_raises_and_random_bytes_never_pass(peer: bytes, signature: bytes, data: bytes) -> None:
    assert verify(peer, signature, data) is False


def test_a_name_is_the_one_libp2p_gives() -> None:
    # the public key and the id of the Ed25519 example in the libp2p peer id specification
    peer = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    assert peer_name(peer) == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"


@given(st.binary(min_size=32, max_size=32))
@settings(max_examples=100, deadline=None)
def test_names_and_peers_are_one_to_one(peer: bytes) -> None:
    name = peer_name(peer)
    assert name.startswith("12D3KooW")
    assert peer_from_name(name) == peer


@given(
    st.text(max_size=60)
    | st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", min_size=52, max_size=52)
)
@settings(max_examples=200, deadline=None)
def test_other_text_is_refused_as_a_peer_id_in_one_line(text: str) -> None:
    with pytest.raises(PayloadError, match="peer id") as caught:
        peer_from_name(text)
    assert "\n" not in str(caught.value)


def test_a_name_with_one_letter_changed_is_refused_or_another_peer() -> None:
    name = peer_name(Signer(bytes(32)).peer)
    with pytest.raises(PayloadError, match="copy it whole"):
        peer_from_name("22" + name[2:])


def test_a_signer_never_shows_its_secret() -> None:
    signer = Signer(bytes(range(32)))
    assert bytes(range(32)).hex() not in repr(signer)
    assert repr(signer) == f"Signer({peer_name(signer.peer)})"


def test_generated_keys_differ() -> None:
    assert Signer.generate().peer != Signer.generate().peer
