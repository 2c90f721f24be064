"""Processor time of a round: the stages of one peer in a gather, one after the other, without a network.

Each stage is what the peer itself calls, on the real data of its round: what it took of its model is what it encodes,
checks from the others and steps by. One thread; only the time of the processor counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from decentral.benchmarks.exchange import Case, terms
from decentral.benchmarks.exchange_peer import model_of
from decentral.consensus.chain import Head
from decentral.node.node import make_replica
from decentral.parameters import digest
from decentral.replica.apply import outer_step
from decentral.replica.codec import Encoded
from decentral.replica.contribution import Contribution, encode_whole
from decentral.replica.measures import Measure
from decentral.rounds.frame_io import Inbox
from decentral.rounds.local_state import CommittedUpdate
from decentral.tensors.ops import difference
from decentral.training.live_model import LiveModel
from decentral.training.schedule import make_schedule
from decentral.wire import body
from decentral.wire.frames import Frame, parse
from decentral.wire.keys import Signer
from decentral.wire.messages import FrameRef, Record

# The stages of a round, in order; under each, indented, what most of it is made of.
STAGES = (
    ("take", "copy the model's parameters and what they changed by"),
    ("encode", "what changed, to a body"),
    ("  select", "the largest of each chunk, quantised"),
    ("  code", "entropy coded"),
    ("seal", "hash and sign it"),
    ("check", "of the others' frames, all of them"),
    ("  parse", "hash and signature"),
    ("  unpack", "body to parts"),
    ("  measure", "finite, norm and sketch"),
    ("step", "from all frames to the next anchor and its digest"),
    ("  digest", "of the anchor"),
    ("merge", "write the anchor into the model"),
)


class Stopwatch:
    """The processor's time of this process by stage and round."""

    def __init__(self) -> None:
        self._rounds: list[dict[str, float]] = []

    def begin_round(self) -> None:
        """Measure another round from now on."""
        self._rounds.append({})

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add what the block takes to a stage."""
        began = time.process_time()
        yield
        self._rounds[-1][stage] = self._rounds[-1].get(stage, 0.0) + time.process_time() - began

    def milliseconds(self, stages: Sequence[str]) -> float:
        """Return what these take together in the median round; the first warms up."""
        return 1000 * median(sum(one[stage] for stage in stages) for one in self._rounds[1:])


class StagedPeer:
    """A peer whose rounds bring, beside its own frame, those of peers who always learn the same."""

    def __init__(self, case: Case) -> None:
        manifest = terms(case)
        self.model = LiveModel(model_of(case.rows, many=case.many), 1, None)
        self.replica = make_replica(manifest, self.model.schema, self.model.read_all())
        self.codec, self.shapes = self.replica.codec, self.replica.shapes(0)
        self.codec.warm_up()
        self.schedule = make_schedule(manifest, b"")
        contents = self.replica.contents
        self.inbox = Inbox(contents.schema, self.codec, contents.merge_codec, unpacked=contents.unpacked)
        self.signers = [Signer(bytes([number]) * 32) for number in range(len(case.ups))]
        genesis = Head.genesis(manifest.digest, self.model.schema.digest, self.replica.digest, self.signers[0].peer)
        self.head = replace(genesis, members=tuple(sorted(signer.peer for signer in self.signers)))
        drawn = torch.Generator().manual_seed(0)
        self.learnt_N = torch.randn(self.replica.numel(0), generator=drawn, dtype=torch.float32, device="cpu")
        self.sent = [self._encode_other(number) for number in range(1, len(case.ups))]

    def _encode_other(self, number: int) -> Encoded:
        return replace(encode_whole(self.replica, 0, self.learnt_N.roll(number)), payloads=())

    def hold_round(self, watch: Stopwatch) -> None:
        """Train, contribute, check what came, step and merge."""
        watch.begin_round()
        head, replica, contents = self.head, self.replica, self.replica.contents
        self.model.write(0, difference(replica.anchors[0], self.learnt_N))  # in place of inner steps
        self.schedule.stepped()
        others = [self._seal_other(number, encoded) for number, encoded in enumerate(self.sent, 1)]
        with watch("take"):
            made = self.schedule.take(self.model, 0, replica.anchors[0], head.hash, 1, outer_step=head.outer_step)
            assert made is not None, "nobody is away"
            made.check_finite(replica)
        with watch("encode"):
            encoded = made.encoded = encode_whole(replica, 0, made.gradient_N, me=self.signers[0].peer)
        made.let_go()
        with watch("seal"):
            own = made.frame(head, self.signers[0])
        contents.unpacked.add(own, encoded.payloads)
        with watch("check"):
            contents.measure(own)
            frames = [own, *(self.inbox.check(frame.data, head)[0] for frame in others)]
        record = self._record(made, frames)
        with watch("step"):
            step = outer_step(replica, record, {frame.hash: frame for frame in frames})
        replica.install(step)
        moved = CommittedUpdate(record, record.hash, 0, step.before_N, step.after_N, made)
        contents.unpacked.forget_before(record.round + 1)
        with watch("merge"):
            self.schedule.merge(moved, self.model)
        self.head = replace(head.extended(record), anchor=replica.digest)
        self._look_into(watch, others)

    def _look_into(self, watch: Stopwatch, others: Sequence[Frame]) -> None:
        """Take parts of stages once more, each by itself."""
        with watch("  select"):
            payloads = self.codec.feedback.send(self.codec.compressor, self.learnt_N, {}, self.shapes).payloads
        with watch("  code"):
            body.encode(self.codec.compressor, payloads)
        with watch("  digest"):
            digest(self.replica.anchors[0])
        for frame in others:
            with watch("  parse"):
                parse(frame.data, lambda header: self.codec.max_body_nbytes(self.shapes))
            with watch("  unpack"):
                unpacked = self.codec.unpack(frame.body, self.shapes)
            with watch("  measure"):
                Measure.of_payloads(self.codec, unpacked)

    def _seal_other(self, number: int, encoded: Encoded) -> Frame:
        made = Contribution(0, self.head.hash, self.learnt_N, self.learnt_N, 1, 1, encoded=encoded)
        return made.frame(self.head, self.signers[number])

    def _record(self, made: Contribution, frames: Sequence[Frame]) -> Record:
        head = self.head
        assert head.anchor is not None, "every step is installed at once"
        refs = [FrameRef(frame.header.sender, frame.hash, 0, made.steps, made.tokens) for frame in frames]
        refs = [replace(ref, based=made.base_step(head)) for ref in sorted(refs, key=lambda ref: ref.peer)]
        return Record(
            head.run, head.epoch, head.round + 1, head.outer_step, 0, 0, head.hash, head.anchor, head.members,
            tuple(refs), (), (), head.members, False,
        )  # fmt: skip


def measure(case: Case, on_done: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:  # Any: JSON
    """Return the milliseconds of processor of each stage and of all together in the median round, for one tensor and
    for many; ``on_done`` is called after each of ``2 * (case.rounds + 1)`` rounds.
    """
    peers = [StagedPeer(replace(case, many=many)) for many in (False, True)]
    watches = [Stopwatch(), Stopwatch()]
    for _ in range(case.rounds + 1):  # in turns: a neighbour that takes the processor for a while takes it from both
        for peer, watch in zip(peers, watches, strict=True):
            peer.hold_round(watch)
            on_done()
    rows = [(name, what, [watch.milliseconds([name]) for watch in watches]) for name, what in STAGES]
    whole = [name for name, _ in STAGES if not name.startswith(" ")]
    rows.append(("all", "without transport, votes and event loop", [watch.milliseconds(whole) for watch in watches]))
    tensors = len(peers[1].model.trained)
    return [
        {"stage": name, "one_ms": round(one, 1), "many_ms": round(many, 1), "tensors": tensors, "what": what}
        for name, what, (one, many) in rows
    ]
