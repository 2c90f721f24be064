"""What receivers keep of each sender: by the names of a snapshot, of members only, and nothing that cannot be."""

from __future__ import annotations

import pytest
import torch

from decentral.errors import PayloadError
from decentral.replica.contents import Senders, is_of_sender, sender_name
from decentral.replica.contribution import encode_whole
from tests.kit.replicas import remembering_replica

A, B = bytes([1] * 32), bytes([2] * 32)


def shared(**beside: torch.Tensor) -> dict[str, torch.Tensor]:
    return remembering_replica().shared_tensors() | beside


def test_what_is_booked_is_kept_until_its_sender_is_no_member():
    senders = Senders(("sent",), [4, 6])
    senders.book(0, {A: {"sent": torch.ones(4)}, B: {"sent": torch.zeros(4)}})
    senders.book(1, {B: {"sent": torch.ones(6)}})
    assert set(senders.tensors()) == {sender_name(0, A, "sent"), sender_name(0, B, "sent"), sender_name(1, B, "sent")}
    assert senders.nbytes == 4 * (4 + 4 + 6)
    senders.keep_only([A])
    assert set(senders.tensors()) == {sender_name(0, A, "sent")}
    assert senders.of(0, B) == {}


def test_a_replica_takes_over_exactly_what_a_snapshot_holds():
    replica, key = remembering_replica(), sender_name(0, A, "sent")
    replica.senders.book(0, {B: {"sent": torch.ones(16)}})
    replica.load(shared(**{key: torch.full((16,), 3.0)}))
    assert set(replica.senders.tensors()) == {key}
    assert torch.equal(replica.senders.of(0, A)["sent"], torch.full((16,), 3.0))


GOOD = A.hex()
HOSTILE = {
    "another fragment": (f"senders/1/{GOOD}/sent", torch.zeros(16)),
    "a negative fragment": (f"senders/-1/{GOOD}/sent", torch.zeros(16)),
    "a fragment in another spelling": (f"senders/00/{GOOD}/sent", torch.zeros(16)),
    "another name": (f"senders/0/{GOOD}/debt", torch.zeros(16)),
    "no name": (f"senders/0/{GOOD}", torch.zeros(16)),
    "more than a name": (f"senders/0/{GOOD}/sent/x", torch.zeros(16)),
    "a short id": ("senders/0/0101/sent", torch.zeros(16)),
    "a long id": (f"senders/0/{GOOD}01/sent", torch.zeros(16)),
    "no id": ("senders/0//sent", torch.zeros(16)),
    "an id in another spelling": (f"senders/0/{'AB' * 32}/sent", torch.zeros(16)),
    "no hexadecimal id": (f"senders/0/{'zz' * 32}/sent", torch.zeros(16)),
    "another size": (f"senders/0/{GOOD}/sent", torch.zeros(15)),
    "another shape": (f"senders/0/{GOOD}/sent", torch.zeros(4, 4)),
    "another dtype": (f"senders/0/{GOOD}/sent", torch.zeros(16, dtype=torch.float64)),
    "whole numbers": (f"senders/0/{GOOD}/sent", torch.zeros(16, dtype=torch.int32)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_state_of_a_sender_that_cannot_be_is_refused_and_changes_nothing(what: str):
    replica, (key, tensor) = remembering_replica(), HOSTILE[what]
    replica.senders.book(0, {B: {"sent": torch.ones(16)}})
    before = dict(replica.shared_tensors())
    with pytest.raises(PayloadError):
        replica.load({"anchor/0": torch.ones(16), "outer/0/momentum": torch.ones(16), key: tensor})
    after = replica.shared_tensors()
    assert set(after) == set(before)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_state_of_more_senders_than_an_epoch_has_members_is_refused():
    many = {sender_name(0, n.to_bytes(32, "big"), "sent"): torch.zeros(16) for n in range(1025)}
    with pytest.raises(PayloadError, match="1025 senders"):
        remembering_replica().load(shared(**many))


def test_where_receivers_keep_nothing_no_state_of_a_sender_is_taken():
    with pytest.raises(PayloadError, match="no receiver of this run keeps"):
        remembering_replica("none").load(shared(**{sender_name(0, A, "sent"): torch.zeros(16)}))


def test_state_of_senders_sorts_behind_all_other_tensors_of_a_snapshot():
    names = sorted(shared(**{sender_name(0, A, "sent"): torch.zeros(16), "buffers": torch.zeros(1)}))
    assert [name for name in names if is_of_sender(name)] == names[-1:]


def test_a_sender_reads_what_was_sent_of_it_from_what_receivers_keep():
    replica, gradient = remembering_replica(), torch.arange(16.0)
    replica.senders.book(0, {A: {"sent": torch.ones(16)}})
    made = encode_whole(replica, 0, gradient, me=A)
    assert torch.equal(replica.codec.decompress(made.payloads), gradient - 1)
    assert made.feedback == {}, "what receivers keep is booked by them, once"
    assert torch.equal(replica.codec.decompress(encode_whole(replica, 0, gradient, me=B).payloads), gradient)
