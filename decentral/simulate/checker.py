"""The judge of a simulated run: from what peers logged and wrote to their disks it says which guarantee was broken.

Knows nothing of how a round is made: it has the records, the frames, the marks that inner steps left, and arithmetic.
Names in brackets are those of the table in docs/simulation.md (I1: one record per round, and so on).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from decentral.compressors import parse_compressor, parse_feedback
from decentral.consensus.chain import SEATS, contributions
from decentral.manifest import Manifest
from decentral.optimizers import make_outer
from decentral.parameters import Fragment
from decentral.replica.codec import Codec, FixedShapes, codec_of, range_shapes
from decentral.rounds.gossip import UNDECIDED
from decentral.simulate.equations import EQUATIONS, NOT_LINEAR, PULLS, SHARE, WEIGH, Averaged, Stood
from decentral.simulate.lessons import UNIT, VALUES, LessonName, first_anchors, toy_schema
from decentral.simulate.trace import Entry, Trace, Verdict
from decentral.state.snapshot import anchor_name
from decentral.wire.frames import HEADER_NBYTES, Frame, parse
from decentral.wire.keys import PeerId
from decentral.wire.messages import Commit, Record

__all__ = ["chain_at_rest", "check", "check_anchors", "check_pairs", "parse_own"]

Hash = bytes
ROUNDED = 1.0  # off by less than this is rounding of shares: one inner step is 840


def check(trace: Trace, manifest: Manifest, lesson: LessonName, seats: int = SEATS) -> Verdict:
    """Judge one finished run."""
    verdict = Verdict()
    if not any(trace.of("went_back")):  # a restored backup forgets its votes: that heals, but it may fork
        check_elections(trace, seats, verdict)
    _nothing_unexpected(trace, verdict)
    _durable_before_applied(trace, verdict)
    _rounds_only_rise(trace, verdict)
    _nothing_is_left_over(trace, verdict)
    _a_checkpoint_keeps_all(trace, verdict)
    _check_contributors(trace, verdict)
    if manifest.exchange.kind == "pair":
        check_pairs(trace, manifest, verdict)
        return verdict  # replicas of gossip are not equal, and nobody says they are
    _same_record_same_bits(trace, verdict)
    _same_record_same_state(trace, verdict)
    _rest_in_one_state(trace, verdict)
    check_anchors(trace, manifest, lesson, verdict)
    remembers = parse_feedback(manifest.compressor.feedback).receiver  # what is sent of a mark is not gone from there
    if lesson == "marks" and manifest.exchange.kind == "gather" and not remembers:
        _Mass(trace, manifest, verdict).check()
    return verdict


def _nothing_unexpected(trace: Trace, verdict: Verdict) -> None:
    """Mistakes that ended a task of a peer, and not the peer."""
    for entry in trace.of("node_unexpected"):
        verdict.say(f"host {entry.host}: {entry.fields['what']} failed with {entry.fields['why']}")


def _same_record_same_bits(trace: Trace, verdict: Verdict) -> None:
    """[I2] Whoever stands at one record holds one anchor."""
    digests: dict[Hash, bytes] = {}
    for event in ("applied", "rested"):
        for entry in trace.of(event):
            seen = digests.setdefault(entry.fields["hash"], entry.fields["digest"])
            if seen != entry.fields["digest"]:
                verdict.divergence += 1
                verdict.say(f"[I2] round {entry.fields['round']}: host {entry.host} holds another anchor than others")


def _same_record_same_state(trace: Trace, verdict: Verdict) -> None:
    """[I2] And one state of the outer method and of senders, of which no digest tells."""
    held: dict[Hash, dict[str, Tensor]] = {}
    for event in ("applied", "rested"):
        for entry in trace.of(event):
            mine = {name: tensor for name, tensor in entry.tensors.items() if name.startswith(("outer/", "senders/"))}
            others = held.setdefault(entry.fields["hash"], mine)
            common = mine.keys() & others.keys()
            apart = sorted(mine.keys() ^ others.keys())
            apart += [name for name in sorted(common) if not torch.equal(others[name], mine[name])]
            if apart:
                verdict.divergence += 1
                verdict.say(
                    f"[I2] round {entry.fields['round']}: host {entry.host} holds another {apart[0]} than others"
                )


def _durable_before_applied(trace: Trace, verdict: Verdict) -> None:
    """[I10] A record is on the disk of its peer before it is applied there, and still known after a restart."""
    logged: set[tuple[int, Hash]] = set()
    applied: dict[int, int] = {}  # host -> highest round applied
    for entry in trace:
        if entry.event == "logged":
            logged.add((entry.host, entry.fields["hash"]))
        elif entry.event == "applied":
            if (entry.host, entry.fields["hash"]) not in logged:
                verdict.say(f"[I10] host {entry.host} applied round {entry.fields['round']} before it was on its disk")
            applied[entry.host] = entry.fields["round"]
        elif entry.event == "adopted":  # a heavier branch may have fewer rounds
            applied[entry.host] = entry.fields["round"]
        elif entry.event in ("forgot", "went_back", "damaged"):
            applied.pop(entry.host, None)
        elif entry.event == "resumed" and entry.fields["round"] < applied.get(entry.host, 0):
            verdict.say(
                f"[I9] host {entry.host} had applied round {applied[entry.host]} and woke up at {entry.fields['round']}"
            )


def _rounds_only_rise(trace: Trace, verdict: Verdict) -> None:
    """[I9] One process never applies a round twice or goes back, except by adopting another branch."""
    at: dict[tuple[int, int], int] = {}
    for entry in trace:
        key = (entry.host, entry.life)
        if entry.event in ("adopted", "resumed"):
            at[key] = entry.fields["round"]
        elif entry.event == "applied":
            if entry.fields["round"] != at.get(key, entry.fields["round"] - 1) + 1:
                verdict.say(f"[I9] host {entry.host} went from round {at[key]} to {entry.fields['round']}")
            at[key] = entry.fields["round"]


def _rest_in_one_state(trace: Trace, verdict: Verdict) -> None:
    """[I14] After the faults stopped all live peers hold one head and one anchor."""
    heads = {(entry.fields["hash"], entry.fields["digest"]) for entry in trace.of("rested")}
    if len(heads) > 1:
        verdict.divergence += 1
        verdict.say(f"[I14] peers came to rest in {len(heads)} states")


def _nothing_is_left_over(trace: Trace, verdict: Verdict) -> None:
    """[I13] Nothing piles up: at rest nobody holds frames or plans of rounds that are over beyond its store."""
    for entry in trace.of("rested"):
        if entry.fields["left_over"]:
            verdict.say(
                f"[I13] host {entry.host} still holds {entry.fields['left_over']} things of rounds that are over"
            )


def _a_checkpoint_keeps_all(trace: Trace, verdict: Verdict) -> None:
    """[I18] Who wakes up where its last checkpoint stood has the progress and the debt that it had then, to the bit.

    Without the debt where it began to swap since: the partner may have been given it, and none is sent twice.
    """
    saved: dict[int, Entry] = {}
    swapping: set[int] = set()
    for entry in trace:
        if entry.event == "saved":
            saved[entry.host] = entry
            swapping.discard(entry.host)
        elif entry.event == "swap_begins":
            swapping.add(entry.host)
        elif entry.event in ("forgot", "went_back", "damaged", "adopted"):
            saved.pop(entry.host, None)
        elif entry.event == "resumed" and entry.host in saved:
            last = saved[entry.host]
            same = _holds(entry, last, "") or (entry.host in swapping and _holds(entry, last, "learnt/"))
            if entry.fields["round"] == last.fields["round"] and not same:
                verdict.lost_updates += 1
                verdict.say(f"[I18] host {entry.host} woke up at round {entry.fields['round']} with less than it saved")


def _holds(entry: Entry, last: Entry, start: str) -> bool:
    return all(torch.equal(tensor, last.tensors[start + name]) for name, tensor in entry.tensors.items())


def _check_contributors(trace: Trace, verdict: Verdict) -> None:
    """[I11] No frame of a stranger, none twice."""
    for commit in trace.commits.values():
        record = commit.record
        named = [ref.peer for ref in (record.contributors or record.frames)]
        if len(set(named)) != len(named) or not set(named) <= set(record.members):
            verdict.say(f"[I11] round {record.round} names a contributor twice or one that is no member")


def _apart_from_rounding(off_N: Tensor) -> Tensor:
    return torch.where(off_N.abs() < ROUNDED, 0.0, off_N)


class _Mass:
    """[I3, I5] Every mark of an inner step is in one committed frame, still with its peer, or given up with a word.

    Never in two of them. Marks are multiples of 840 and sums stay below 2**24, so they are exact, up to the rounding of
    shares that a peer sent after an absence. Steps that went down with a crashed process are allowed to be gone (G4),
    and those that a peer gave up because it was away (G11); steps that moved the anchor twice are not, whatever
    happened.
    """

    def __init__(self, trace: Trace, manifest: Manifest, verdict: Verdict) -> None:
        self.trace, self.verdict = trace, verdict
        self.codec = Codec(parse_compressor(manifest.compressor.chain), parse_feedback(manifest.compressor.feedback))
        self.shapes = [self.codec.cut(fragment) for fragment in toy_schema("marks", manifest.outer.fragments).fragments]

    def check(self) -> None:
        """Compare made with committed and carried, host by host."""
        committed = self._sums_of(list(chain_at_rest(self.trace)))
        peers = self._peers()
        gone_back = {entry.host for entry in self.trace.of("went_back")}
        for entry in self.trace.of("rested"):
            if entry.host in gone_back:  # its disk brought back steps that were committed since
                continue
            mine = [peer for peer, host in peers.items() if host == entry.host]
            for f in range(len(self.shapes)):
                total_N = sum((committed[peer, f] for peer in mine if (peer, f) in committed), torch.zeros(VALUES))
                unmoved_N = self._progress(entry.host, f) - total_N - entry.tensors[str(f)]
                self._judge(entry, f, unmoved_N, self._losses(entry.host, f))

    def _judge(self, entry: Entry, f: int, unmoved_N: Tensor, given_up_N: Tensor) -> None:
        """Say what was lost or counted twice.

        Progress that a branch left uncounted is given up with it: the branch that won may count that in full. So may a
        record what an earlier life had sent, and a later one gave up.
        """
        off_N = _apart_from_rounding(unmoved_N - given_up_N)
        in_full = self._has_adopted(entry.host) or self._counts_after_all(entry.host)
        over_N = _apart_from_rounding(unmoved_N) if in_full else off_N
        twice = int((-over_N).clamp(min=0).sum().item() / UNIT)
        lost = int(off_N.clamp(min=0).sum().item() / UNIT)
        if (over_N < 0).any():
            self.verdict.duplicated_updates += max(twice, 1)
            self.verdict.say(f"[I5] host {entry.host}, fragment {f}: {twice} inner steps moved the anchor twice")
        if lost and self._never_down(entry.host):
            self.verdict.lost_updates += lost
            self.verdict.say(f"[I3] host {entry.host}, fragment {f}: {lost} inner steps are gone; it never went down")

    def _counts_after_all(self, host: int) -> bool:
        """Tell whether a record named what an earlier life of ``host`` had sent, after a later one was away."""
        mine = {peer for peer, other in self._peers().items() if other == host}
        away = min((entry.time for entry in self.trace.of("away") if entry.host == host), default=math.inf)
        later = (e for e in self.trace.of("applied") if e.host == host and e.time > away and not e.fields["mine"])
        records = (self.trace.commits[entry.fields["hash"]].record for entry in later)
        return any(not mine.isdisjoint(ref.peer for ref in contributions(record)) for record in records)

    def _sums_of(self, chain: list[Record]) -> dict[tuple[PeerId, int], Tensor]:
        sums: dict[tuple[PeerId, int], Tensor] = defaultdict(lambda: torch.zeros(VALUES))
        for record in chain:
            for ref in record.frames:
                body = parse_own(self.trace.frames[ref.frame]).body
                sums[ref.peer, record.fragment] += self.codec.decode(body, self.shapes[record.fragment])
        return sums

    def _peers(self) -> dict[PeerId, int]:
        return {entry.fields["peer"]: entry.host for entry in self.trace.of("started")}

    def _progress(self, host: int, f: int) -> Tensor:
        made_N = torch.zeros(VALUES)
        for entry in self.trace.of("stepped"):
            if entry.host == host and f in entry.fields["part"]:
                made_N[(entry.fields["number"] - 1 + f) % VALUES] += UNIT
        return made_N

    def _losses(self, host: int, f: int) -> Tensor:
        """Return what absences cost. A crash before the next checkpoint takes it back, and so does damage to that
        checkpoint: the one before it still has that progress.
        """
        since_saved = [torch.zeros(VALUES)]  # between checkpoints, the last since the newest one
        for entry in (entry for entry in self.trace if entry.host == host):
            if entry.event == "away" and str(f) in entry.tensors:
                since_saved[-1] = since_saved[-1] + entry.tensors[str(f)]
            elif entry.event == "saved":
                since_saved.append(torch.zeros(VALUES))
            elif entry.event == "damaged":
                del since_saved[-2:]
                since_saved.append(torch.zeros(VALUES))
            elif entry.event == "resumed":
                since_saved[-1] = torch.zeros(VALUES)
        return torch.stack(since_saved).sum(0)

    def _has_adopted(self, host: int) -> bool:
        return any(entry.host == host for entry in self.trace.of("adopted"))

    def _never_down(self, host: int) -> bool:
        told = (entry.event for entry in self.trace if entry.host == host)
        return not any(event in ("crashed", "left", "failed", "adopted") for event in told)


# ---- who decided, and by what votes ----
#
# There is one record after each record, by a majority of its voters.
#
# Draws committees by itself, as docs/protocol.md says it is done, rather than ask the code that is judged.


def check_elections(trace: Trace, seats: int, verdict: Verdict) -> None:
    """[I1, I11] ``seats``: of a committee, where there are more members."""
    _check_one_record(trace, seats, verdict)
    for commit in trace.commits.values():
        _judge_votes(commit, seats, verdict)


def _judge_votes(commit: Commit, seats: int, verdict: Verdict) -> None:
    record, votes = commit.record, {peer for peer, _ in commit.certificate.votes}
    voters = _voters(record, seats)
    if not votes <= voters:
        verdict.say(f"[I11] round {record.round} was voted for by a peer that has no vote")
    if 2 * len(votes & voters) <= len(voters):
        verdict.say(f"[I1] round {record.round} was committed by {len(votes)} of {len(voters)}")


def _check_one_record(trace: Trace, seats: int, verdict: Verdict) -> None:
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
    """Return whether all whom ``record`` drops had said farewell, and none of them was back before the rivals were
    made.
    """
    holders = {entry.host for entry in trace.of("logged") if entry.fields["hash"] == record.hash}
    if any(entry.host in holders and entry.fields["round"] == record.round for entry in trace.of("node_shrunk")):
        return False  # some of them were silent
    hashes = {rival.hash for rival in rivals}
    made = max(entry.time for entry in trace.of("logged") if entry.fields["hash"] in hashes)
    dropped = set(record.members) - set(record.next_members)
    hosts = {entry.host for entry in trace.of("started") if entry.fields["peer"] in dropped}
    last = {e.host: e.event for e in trace if e.event in ("started", "left", "crashed") and e.time <= made}
    return all(last[host] == "left" for host in hosts)


# ---- anchors ----
#
# [I4]: where anchors came to rest, by the records, the frames that they name and the method's equation.
#
# The equations are written again in `decentral.simulate.equations`, from the papers, so that an error of a method
# shows.
#
# Shape suffix: N = elements of one fragment.

FLOAT_ERROR = 1e-4  # of the largest value: what float32 leaves of some hundred steps


def check_anchors(trace: Trace, manifest: Manifest, lesson: LessonName, verdict: Verdict) -> None:
    """The anchor moved by the equation of what the records name, and by nothing else."""
    outer = manifest.outer
    if not _can_be_judged(manifest):
        return
    keys = dataclasses.asdict(make_outer(outer.method, outer.hyper))  # type: ignore[call-overload]  # a dataclass
    firsts_N, schema = first_anchors(lesson, outer.fragments), toy_schema(lesson, outer.fragments)
    averaging, chain = _Averaging(trace, manifest), list(reversed(list(chain_at_rest(trace))))
    averaged = [averaging.of(record, schema.fragments[record.fragment]) for record in chain]
    for f, first_N in enumerate(firsts_N):
        run = [one for record, one in zip(chain, averaged, strict=True) if one and record.fragment == f]
        moved_N = EQUATIONS[outer.method](run, keys) if run else torch.zeros(())
        for entry in trace.of("rested"):
            last_N = entry.tensors[anchor_name(f)].double()
            off, largest = (last_N - first_N.double() - moved_N).abs().max(), last_N.abs().max()
            if float(off) > FLOAT_ERROR * max(1.0, float(largest)):
                verdict.lost_updates += 1
                verdict.say(f"[I4] host {entry.host}, fragment {f}: its anchor is not where the records lead")


def _can_be_judged(manifest: Manifest) -> bool:
    """Return whether a record's mean shows in its frames alone: owners' results do, and frames that count alike."""
    outer, reduces = manifest.outer, manifest.exchange.kind == "reduce"
    plain = outer.norm_clip in (None, "none") and outer.aggregation is None
    alike = plain and manifest.weighting == "equal" and outer.method not in WEIGH
    known = manifest.weighting == "equal" or outer.method not in SHARE if reduces else alike
    return outer.method in EQUATIONS and known


class _Averaging:
    """Means of records, from the bytes that their frames hold; they are asked for in order.

    Under ef21 and econtrol a contribution is all that its sender sent for the fragment since it came in.
    """

    def __init__(self, trace: Trace, manifest: Manifest) -> None:
        self._fragments = manifest.outer.fragments
        self._frames, self._codec = trace.frames, codec_of(manifest)
        self._remembers = bool(parse_feedback(manifest.compressor.feedback).receiver)
        self._sent: dict[tuple[PeerId, int], Tensor] = {}

    def of(self, record: Record, fragment: Fragment) -> Averaged | None:
        """Return what one record averages; None where it names no frames."""
        averaged = self._mean(record, fragment) if record.frames else None
        self._sent = {key: sent_N for key, sent_N in self._sent.items() if key[0] in record.next_members}
        return averaged

    def _mean(self, record: Record, fragment: Fragment) -> Averaged:
        name = fragment.parameters[0].name
        frames = [(ref.part, parse_own(self._frames[ref.frame])) for ref in record.frames]
        if record.contributors:
            parts = [self._change(frame, range_shapes(*record.partition[part][1:])) for part, frame in sorted(frames)]
            mean_N, count = torch.cat(parts), len(record.contributors)
            rows_KN = mean_N.expand(count, -1)
            return Averaged(mean_N, record.contributors, rows_KN, self._ages(record), name)
        rows_KN = torch.stack([self._contribution(frame, record.fragment, fragment.shapes) for _, frame in frames])
        return Averaged(rows_KN.mean(0), record.frames, rows_KN, self._ages(record), name)

    def _ages(self, record: Record) -> list[int]:
        return [(record.outer_step - ref.based) // self._fragments for ref in contributions(record)]

    def _contribution(self, frame: Frame, fragment: int, shapes: FixedShapes) -> Tensor:
        change_N, key = self._change(frame, shapes), (frame.header.sender, fragment)
        if not self._remembers:
            return change_N
        self._sent[key] = self._sent.get(key, torch.zeros_like(change_N)) + change_N
        return self._sent[key]

    def _change(self, frame: Frame, shapes: FixedShapes) -> Tensor:
        """The first channel."""
        channels = frame.header.channels
        return self._codec.decode(frame.body, tuple(shapes) * channels, channels).view(channels, -1)[0].double()


def chain_at_rest(trace: Trace) -> Iterator[Record]:
    """The records behind the state in which the peers rest, newest first."""
    last = next((entry.fields["hash"] for entry in trace.of("rested")), b"")
    while (commit := trace.commits.get(last)) is not None:
        yield commit.record
        last = commit.record.previous


def parse_own(data: bytes) -> Frame:
    """A frame whose bytes are a peer's own."""
    return parse(data, lambda header: len(data) - HEADER_NBYTES)


# ---- pairs of gossip ----
#
# [I8]: both of a pair stepped, and nothing was made or lost by it, by what each peer noted of its own steps.
#
# A step that both of a pair took moves their sum by what the equation says and by nothing else: the two pulls towards
# the mean cancel.

TOLERANCE = 1e-3  # of the largest parameter: what fp16 and float32 rounding leave of a sum of two
NEAR = 3 * UNDECIDED  # s between two entries of one step: a peer that crashed or restored a backup takes it again
DEATHS = ("crashed", "failed", "gone")  # who has "left" says goodbye for a while, and may still ask


def check_pairs(trace: Trace, manifest: Manifest, verdict: Verdict) -> None:
    """[I8] Both of a pair step with each other, and their sum is kept."""
    hosts = {entry.fields["peer"]: entry.host for entry in trace.of("started")}
    taken: dict[tuple[int, int], list[Entry]] = defaultdict(list)  # host, gossip step: again after a crash
    for entry in trace.of("swapped"):
        taken[entry.host, entry.fields["round"]].append(entry)
    for mine in trace.of("swapped"):
        if mine.fields["partner"] is None:
            continue
        partner, number = hosts[mine.fields["partner"]], mine.fields["round"]
        near = [e for e in taken[partner, number] if abs(e.time - mine.time) < NEAR]
        both = [e for e in near if e.fields["partner"] is not None]
        if both and mine.host < partner:
            _sum_is_kept(mine, min(both, key=lambda e: abs(e.time - mine.time)), manifest, verdict)
        elif near and not both and not _undecidable(trace, mine, partner):
            verdict.lost_updates += 1
            verdict.say(f"[I8] gossip step {number}: host {mine.host} took it with host {partner}, which took it alone")


def _undecidable(trace: Trace, mine: Entry, partner: int) -> bool:
    """Return whether one of the two died, or the link between them, while a leader was waiting for its answer.

    The two generals' problem: the last to answer cannot know that it was heard. Nothing else is an excuse.
    """
    number, pair = mine.fields["round"], {mine.host, partner}
    for told in trace.of("node_undecided"):  # by the leader, when it gave up
        asked = told.time - told.fields["seconds"]
        if told.host == partner and told.fields["round"] == number and asked <= mine.time <= told.time:
            return any(_strikes(entry, pair) for entry in trace if asked <= entry.time <= told.time)
    close = (entry for entry in trace if abs(entry.time - mine.time) <= UNDECIDED)  # it was asked within that
    return any(entry.event in DEATHS and entry.host in pair for entry in close)


def _strikes(entry: Entry, pair: set[int]) -> bool:
    if entry.event == "cut":
        return any(set(cut) == pair for cut in entry.fields["pairs"])
    return entry.event in DEATHS and entry.host in pair


def _sum_is_kept(mine: Entry, other: Entry, manifest: Manifest, verdict: Verdict) -> None:
    outer = manifest.outer
    if outer.method not in PULLS:
        return
    keys = dataclasses.asdict(make_outer(outer.method, outer.hyper))  # type: ignore[call-overload]  # a dataclass
    pair = (mine, other)
    moved_2N = torch.stack([entry.tensors["after"].double() - entry.tensors["before"].double() for entry in pair])
    told_2N = torch.stack([PULLS[outer.method](Stood.of(entry.tensors), keys) for entry in pair])
    off_N = (moved_2N - told_2N).sum(0)
    if outer.method in NOT_LINEAR:  # only the sum of a fragment's values is kept
        off_N = off_N.mean(0, keepdim=True)
    largest = float(torch.stack([mine.tensors["before"], mine.tensors["change"]]).abs().max())
    if float(off_N.abs().max()) > TOLERANCE * largest + 1e-6:
        verdict.lost_updates += 1
        verdict.say(
            f"[I8] gossip step {mine.fields['round']}: hosts {mine.host} and {other.host} did not keep their sum"
        )
