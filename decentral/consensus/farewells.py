"""What members that leave say of their votes, so that those that stay need not guess.

A peer that has said farewell votes no more. So what it says is a promise for every ballot of the round, and, as it is
signed, a vote that counts: the few that are left commit what the others had chosen, or know that they chose nothing.

Five peers were stopped within a second; three had just chosen a record, and the last one to be stopped, which had not
heard of it, counted itself as all that was left and chose another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from decentral.consensus.acceptor import Acceptor
from decentral.consensus.chain import majority
from decentral.consensus.voting import Voting
from decentral.errors import PayloadError
from decentral.wire.keys import PeerId, Signer, verify
from decentral.wire.messages import Certificate, Commit, Farewell, Record, vote_text


class Farewells:
    """The last word of each member that said one."""

    def __init__(self, voting: Voting) -> None:
        self._voting = voting
        self._said: dict[PeerId, Farewell] = {}

    def take(self, sender: PeerId, farewell: Farewell) -> None:
        """Book one. Raises PayloadError when its vote is not signed by its sender."""
        record = farewell.accepted
        if record is not None and not verify(sender, farewell.signature, _text(record, farewell.accepted_ballot)):
            raise PayloadError(f"farewell in round {farewell.round}: its vote is not signed by its sender; drop it")
        self._said[sender] = farewell

    def since(self, peer: PeerId) -> int:
        """The round in which ``peer`` stood when it said farewell; -1 when it did not."""
        said = self._said.get(peer)
        return -1 if said is None else said.round

    def forget(self, peer: PeerId) -> None:
        """It is back."""
        self._said.pop(peer, None)

    def keep(self, peers: Collection[PeerId]) -> None:
        """Forget all others."""
        self._said = {peer: farewell for peer, farewell in self._said.items() if peer in peers}

    def votes(self, round_: int, but: Collection[PeerId]) -> dict[PeerId, tuple[int, Record | None]]:
        """The ballot and the record that each accepted last in ``round_``; -1 and None for nothing.

        ``but``: those who have been away for so long that nobody waits for the frames of their votes any more.
        """
        said = {peer: farewell for peer, farewell in self._said.items() if farewell.round <= round_ and peer not in but}
        nothing = (-1, None)
        return {peer: (f.accepted_ballot, f.accepted) if f.round == round_ else nothing for peer, f in said.items()}

    def elected(self, own: Acceptor, signer: Signer) -> Commit | None:
        """The commit that those who left had voted for, with or without our own vote."""
        votes: dict[tuple[int, Record], dict[PeerId, bytes]] = defaultdict(dict)
        for peer, said in self._said.items():
            if said.round == own.round and said.accepted is not None:
                votes[said.accepted_ballot, said.accepted][peer] = said.signature
        for (ballot, record), signatures in votes.items():
            if (own.accepted_ballot, own.accepted) == (ballot, record):
                signatures[signer.peer] = signer.sign(_text(record, ballot))
            voters = self._voting.voters_on(record)
            counted = tuple(sorted((peer, signature) for peer, signature in signatures.items() if peer in voters))
            if len(counted) >= majority(voters):
                return Commit(record, Certificate(ballot, counted))
        return None


def farewell(acceptor: Acceptor, signer: Signer) -> Farewell:
    """The last word of the peer whose acceptor and key these are."""
    record, ballot = acceptor.accepted, acceptor.accepted_ballot
    signature = bytes(64) if record is None else signer.sign(_text(record, ballot))
    return Farewell(acceptor.round, ballot, record, signature)


def _text(record: Record, ballot: int) -> bytes:
    return vote_text(record.run, record.epoch, record.round, ballot, record.hash)
