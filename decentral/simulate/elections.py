"""Whether records were decided by those whose votes count: one record after each, by a majority of its voters.

Draws committees by itself, as docs/protocol.md says it is done, rather than ask the code that is judged.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict

from decentral.simulate.trace import Trace
from decentral.simulate.verdict import Verdict
from decentral.wire.keys import PeerId
from decentral.wire.messages import Commit, Record

Hash = bytes


def check_elections(trace: Trace, seats: int, verdict: Verdict) -> None:
    """[I1, I11] ``seats``: of a committee, where there are more members."""
    _one_record_per_round(trace, seats, verdict)
    for commit in trace.commits.values():
        _judge(commit, seats, verdict)


def _judge(commit: Commit, seats: int, verdict: Verdict) -> None:
    record, votes = commit.record, {peer for peer, _ in commit.certificate.votes}
    voters = _voters(record, seats)
    if not votes <= voters:
        verdict.say(f"[I11] round {record.round} was voted for by a peer that has no vote")
    if 2 * len(votes & voters) <= len(voters):
        verdict.say(f"[I1] round {record.round} was committed by {len(votes)} of {len(voters)}")


def _one_record_per_round(trace: Trace, seats: int, verdict: Verdict) -> None:
    """Two records after one predecessor: never, unless the few who were left gave up others who were silent."""
    successors: dict[Hash, list[Record]] = defaultdict(list)
    for commit in trace.commits.values():
        successors[commit.record.previous].append(commit.record)
    for records in successors.values():
        if len(records) < 2:
            continue
        whole = [r for r in records if _keeps_a_majority(r, seats) or _by_farewells(r, records, trace)]
        if len(whole) > 1:
            verdict.divergence += 1
            hashes = ", ".join(sorted(record.hash.hex()[:6] for record in whole))
            verdict.say(f"[I1] round {whole[0].round} has {len(whole)} records after one predecessor: {hashes}")


def _voters(record: Record, seats: int) -> set[PeerId]:
    """The first in the draw; of those whom the record keeps, where it drops half of them or more."""
    drawn = _drawn(record)
    if _keeps_a_majority(record, seats):
        return set(drawn[:seats])
    return set([peer for peer in drawn if peer in record.next_members][:seats])


def _keeps_a_majority(record: Record, seats: int) -> bool:
    committee = _drawn(record)[:seats]
    return 2 * len(set(committee) & set(record.next_members)) > len(committee)


def _drawn(record: Record) -> list[PeerId]:
    text = b"committee" + record.run + record.epoch.to_bytes(8, "little") + b"".join(record.members)
    key = hashlib.blake2b(text, digest_size=32).digest()
    ranks = {peer: hashlib.blake2b(peer, digest_size=16, key=key).digest() for peer in record.members}
    return sorted(record.members, key=ranks.__getitem__)


def _by_farewells(record: Record, rivals: list[Record], trace: Trace) -> bool:
    """Whether all whom ``record`` drops had said farewell, and none of them was back before the rivals were made."""
    holders = {entry.host for entry in trace.of("logged") if entry.fields["hash"] == record.hash}
    if any(entry.host in holders and entry.fields["round"] == record.round for entry in trace.of("node_shrunk")):
        return False  # some of them were silent
    hashes = {rival.hash for rival in rivals}
    made = max(entry.time for entry in trace.of("logged") if entry.fields["hash"] in hashes)
    dropped = set(record.members) - set(record.next_members)
    hosts = {entry.host for entry in trace.of("started") if entry.fields["peer"] in dropped}
    last = {e.host: e.event for e in trace if e.event in ("started", "left", "crashed") and e.time <= made}
    return all(last[host] == "left" for host in hosts)
