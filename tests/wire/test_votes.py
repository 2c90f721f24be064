"""A commit is believed for its signatures alone."""

import dataclasses

import pytest

from decentral.errors import PayloadError
from decentral.wire.keys import Signer
from decentral.wire.messages import Certificate, Commit, Record, verify_certificate, vote_text

SIGNERS = sorted((Signer(bytes([i] * 32)) for i in range(5)), key=lambda signer: signer.peer)
VOTERS = tuple(signer.peer for signer in SIGNERS)
RECORD = Record(bytes(32), 1, 2, 3, 0, 0, bytes(32), bytes(32), VOTERS, (), (), (), VOTERS, False)


def vote(signer: Signer, record: Record = RECORD, ballot: int = 4) -> tuple[bytes, bytes]:
    text = vote_text(record.run, record.epoch, record.round, ballot, record.hash)
    return signer.peer, signer.sign(text)


def commit(*votes: tuple[bytes, bytes], record: Record = RECORD, ballot: int = 4) -> Commit:
    return Commit(record, Certificate(ballot, votes))


def test_a_majority_of_true_votes_is_believed() -> None:
    verify_certificate(commit(*map(vote, SIGNERS[:3])), VOTERS, 3)
    verify_certificate(commit(*map(vote, SIGNERS)), VOTERS, 3)


def test_one_vote_too_few_is_refused() -> None:
    with pytest.raises(PayloadError, match="2 votes, a majority is 3 of 5"):
        verify_certificate(commit(*map(vote, SIGNERS[:2])), VOTERS, 3)


def test_one_voter_counted_twice_is_refused() -> None:
    with pytest.raises(PayloadError, match="there twice"):
        verify_certificate(commit(*map(vote, [SIGNERS[0], SIGNERS[0], SIGNERS[1]])), VOTERS, 3)


def test_a_strangers_vote_is_refused() -> None:
    with pytest.raises(PayloadError, match="not by one of its voters"):
        verify_certificate(commit(*map(vote, [*SIGNERS[:2], Signer(bytes([9] * 32))])), VOTERS, 3)


@pytest.mark.parametrize("position", range(64))
def test_a_vote_with_one_changed_byte_is_refused(position: int) -> None:
    peer, signature = vote(SIGNERS[2])
    changed = bytearray(signature)
    changed[position] ^= 1
    with pytest.raises(PayloadError, match="is not signed by it"):
        verify_certificate(commit(*map(vote, SIGNERS[:2]), (peer, bytes(changed))), VOTERS, 3)


@pytest.mark.parametrize(
    "changes", [{"run": bytes([1] * 32)}, {"epoch": 2}, {"round": 3}, {"base": bytes([1] * 32)}, {"final": True}]
)
def test_votes_for_one_record_do_not_count_for_another(changes: dict[str, object]) -> None:
    other = dataclasses.replace(RECORD, **changes)  # type: ignore[arg-type]
    with pytest.raises(PayloadError, match="is not signed by it"):
        verify_certificate(commit(*map(vote, SIGNERS), record=other), VOTERS, 3)


def test_votes_of_one_ballot_do_not_count_in_another() -> None:
    with pytest.raises(PayloadError, match="is not signed by it"):
        verify_certificate(commit(*map(vote, SIGNERS), ballot=5), VOTERS, 3)


def test_a_quorum_of_nobody_is_not_believed() -> None:
    with pytest.raises(PayloadError, match="0 votes"):
        verify_certificate(commit(), VOTERS, 1)
