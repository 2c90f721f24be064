"""Looks at who contributed to a round: a peer whose update is far larger than the others', two that send the same one.

Both train at full speed, commit every round and look healthy; the first ruins the run, the second wastes a machine.
Only names are told: what becomes of an update is the manifest's business (``outer.norm_clip``).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decentral.consensus.chain import contributions
from decentral.optimizers.aggregation.norm_clip import typical_norm
from decentral.optimizers.aggregation.sketches import cosines
from decentral.replica.received.measures import Measure
from decentral.wire.keys import PeerId, peer_name
from decentral.wire.messages import Record

# Peers of a clean run stayed within 1.11 times the median; three times their learning rate made 2.3 to 2.7, a rate of
# 0.5 made 70 to 280 (experiments/clip). The spread guards swarms whose peers differ more than that.
OUTLIER_TIMES = 2.0  # the median norm
OUTLIER_SPREAD = 6.0  # median absolute deviations above it
# Honest dense updates had cosines up to 0.85, 0.77 and 0.61 in the first three rounds, 0.94, 0.89 and 0.83 with eight
# times the batch, and falling; sparse ones up to 0.34. Twins had 1.0; where their gradients differed by 1 %, 0.996 and
# more dense, 0.97 to 0.90 sparse (experiments/clip).
TWIN_COSINE = 0.95
TWIN_ROUNDS = 3  # in a row
TOLD_AGAIN = 20  # rounds until the same is said again

Event = tuple[str, dict[str, object]]


class Scrutiny:
    """Remembers what it said and who was alike, of one peer's view of the rounds."""

    def __init__(self) -> None:
        self._alike: Counter[tuple[PeerId, PeerId]] = Counter()  # rounds in a row, of those that both contributed to
        self._told: dict[tuple[PeerId, ...], int] = {}  # an outlier or a pair -> the round it was last told

    def events(self, record: Record, measures: Mapping[PeerId, Measure]) -> list[Event]:
        """What is to be told of the contributors of ``record`` as far as they were measured."""
        refs = [ref for ref in contributions(record) if ref.peer in measures]
        norms = [measures[ref.peer].norm for ref in refs]
        far = outliers(norms, [ref.steps for ref in refs])
        if far:  # an anchor that was thrown off pulls all honest peers the same way: cosines of 0.94 to 0.99
            self._alike.clear()
            named = [(refs[i].peer, norms[i]) for i in far if self._is_news((refs[i].peer,), record.round)]
            return [("outlier", _outlier(record, peer, norm, norms)) for peer, norm in named]
        return self._twins(record.round, sorted(ref.peer for ref in refs), measures)

    def _twins(self, round_: int, peers: Sequence[PeerId], measures: Mapping[PeerId, Measure]) -> list[Event]:
        if len(peers) < 2:
            return []
        cosine = cosines([measures[peer].sketch_S for peer in peers])
        alike = {(peers[i], peers[j]): float(cosine[i, j]) for i, j in _above(cosine, TWIN_COSINE)}
        here, found = set(peers), list[Event]()
        for pair in [pair for pair in self._alike if here.issuperset(pair) and pair not in alike]:
            del self._alike[pair]
        for (one, other), how_much in alike.items():
            self._alike[one, other] += 1
            if self._alike[one, other] >= TWIN_ROUNDS and self._is_news((one, other), round_):
                names = [peer_name(one), peer_name(other)]
                found.append(("twins", {"round": round_, "peers": names, "cosine": how_much}))
        return found

    def _is_news(self, who: tuple[PeerId, ...], round_: int) -> bool:
        self._told = {key: told for key, told in self._told.items() if round_ - told < TOLD_AGAIN}
        if who in self._told:
            return False
        self._told[who] = round_
        return True


def outliers(norms: Sequence[float], steps: Sequence[int]) -> list[int]:
    """Places of those far above the lower median, given their inner steps: an absent peer brings several rounds'."""
    typical = typical_norm(norms)
    if typical is None:
        return []
    least = typical + OUTLIER_SPREAD * statistics.median(abs(norm - typical) for norm in norms)
    usual = max(1, statistics.median_low(steps))
    allowed = [OUTLIER_TIMES * typical * max(1.0, count / usual) for count in steps]
    return [i for i, norm in enumerate(norms) if norm > max(least, allowed[i])]


def _above(cosine: Tensor, bound: float) -> list[list[int]]:
    """Places of pairs, each once: most swarms have none, and a loop over all pairs of 1,024 took a second."""
    pairs: list[list[int]] = torch.triu(cosine > bound, diagonal=1).nonzero().tolist()
    return pairs


def _outlier(record: Record, peer: PeerId, norm: float, norms: Sequence[float]) -> dict[str, object]:
    typical = statistics.median_low(norms)
    said = {"peer": peer_name(peer), "norm": norm, "median": typical, "times": norm / typical}
    return {"round": record.round, "outer_step": record.outer_step + 1, **said}
