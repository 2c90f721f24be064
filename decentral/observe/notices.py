"""Sentences about what peers do to the run, from the events that name them; the status repeats them for a while, and
warnings of figures until they are back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decentral.observe.diagnostics.words import back_sentence, warning
from decentral.observe.health import short_name

LASTS = 30  # rounds: events are told again after 20, so what goes on is always there


class Notices:
    """What was said of outliers, twins, rounds that moved nothing and figures, the newest for each."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, ...], tuple[int, str]] = {}  # who -> round, sentence
        self._lasting: dict[str, str] = {}  # figure that is out of its band -> sentence

    def hear(self, event: str, fields: Mapping[str, Any], me: str) -> str | None:
        """The sentence of an event that is worth one, also remembered. ``me``: the peer that speaks."""
        if event in ("out_of_band", "back_in_band"):
            return self._hear_of_band(fields, is_out=event == "out_of_band")
        if event not in _SENTENCES:
            return None
        who, sentence = _SENTENCES[event](fields, me)
        self._said[who] = (int(fields["round"]), sentence)
        return sentence

    def _hear_of_band(self, fields: Mapping[str, Any], *, is_out: bool) -> str:
        """A warning holds until its figure is back."""
        figure, value, outer_step = str(fields["figure"]), float(fields["value"]), int(fields["outer_step"])
        others = {other: said for other, said in self._lasting.items() if other != figure}
        if not is_out:
            self._lasting = others
            return back_sentence(figure, value, outer_step)
        sentence = warning(figure, value, str(fields["why"]), outer_step)
        self._lasting = {**others, figure: sentence}
        return sentence

    def now(self, round_: int) -> tuple[str, ...]:
        """What still holds in ``round_``, the newest first, and figures out of their bands behind that."""
        self._said = {who: said for who, said in self._said.items() if round_ - said[0] < LASTS}
        newest = sorted(self._said.values(), reverse=True)
        return (*(sentence for _, sentence in newest), *reversed(self._lasting.values()))


def _outlier(fields: Mapping[str, Any], me: str) -> tuple[tuple[str, ...], str]:
    at = fields.get("outer_step", fields["round"])  # of a version before 0.2, which told the record's number alone
    peer, much = str(fields["peer"]), f"{fields['times']:.3g} times as large as the others' (round {at})"
    if peer == me:
        return (peer,), (
            f"your update is {much}: compare learning rate and data with theirs, or decentral leave; after training "
            "alone for a while this passes with the next merge"
        )
    return (peer,), (
        f"the update of {short_name(peer)} is {much}: its learning rate or data differ, or it trained alone for a "
        'while; where norm_clip = "median" under [outer] does not shorten it, it can ruin the run'
    )


def _twins(fields: Mapping[str, Any], me: str) -> tuple[tuple[str, ...], str]:
    peers: Sequence[str] = fields["peers"]
    one, other = ("you" if peer == me else short_name(peer) for peer in sorted(peers, key=lambda peer: peer != me))
    return tuple(peers), (
        f"{one} and {other} send nearly the same update: do both use the same seed and data? see peer.seed, peer.shard"
    )


def _unmoved(fields: Mapping[str, Any], me: str) -> tuple[tuple[str, ...], str]:
    method, why, round_ = fields["method"], fields["why"], fields["round"]
    return ("",), f"round {round_} moved nothing: {method}: {why}; what was contributed to it is gone"


def _unsaid(fields: Mapping[str, Any], me: str) -> tuple[tuple[str, ...], str]:
    method, why, round_ = fields["method"], fields["why"], fields["round"]
    return ("unsaid",), f"your contribution to round {round_} went without a summary: {method}: {why}; ask its author"


_SENTENCES = {"outlier": _outlier, "twins": _twins, "unmoved": _unmoved, "unsaid": _unsaid}
