"""What each contributor of a record counts: asked of the method with what the record tells, and looked at."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from decentral.optimizers import Contributor, OuterMethod
from decentral.optimizers.aggregation.mean import contribution_weights
from decentral.optimizers.base import Layout, Part, State, numel_of
from decentral.replica.method_output import Weighed, called, weighed
from decentral.replica.rule_output import Unusable
from decentral.wire.messages import FrameRef


def told_of(
    contributors: Sequence[FrameRef], outer_step: int, num_fragments: int, norms: Sequence[float] | None = None
) -> list[Contributor]:
    """What a method may know of each; ``norms``: of their changes, where all peers measured them."""
    measured: Sequence[float | None] = [None] * len(contributors) if norms is None else norms
    ages = [(outer_step - ref.based) // num_fragments for ref in contributors]
    return [
        Contributor(ref.peer, ref.tokens, ref.steps, age, ref.summary, norm)
        for ref, age, norm in zip(contributors, ages, measured, strict=True)
    ]


def weights_of(method: OuterMethod, weighting: str, told: Sequence[Contributor], state: State) -> Weighed:
    """What each counts in the mean of the changes. ``weighting``: equal, or tokens."""
    given = contribution_weights(weighting, [one.tokens for one in told])
    return weighed(lambda: method.weights(told, given, state), len(told))


def state_weights_of(
    method: OuterMethod, told: Sequence[Contributor], weights: Sequence[float], state: State, channels: int
) -> list[Weighed]:
    """What each counts in the mean of each of so many further channels."""
    asked = [partial(method.state_weights, place, told, weights, state) for place in range(channels)]
    return [weighed(ask, len(told)) for ask in asked]


def outside_of(method: OuterMethod, told: Sequence[Contributor], layout: Layout) -> list[Part]:
    """Where the change of each counts nothing. Raises Unusable where the method says nothing that fits."""
    numel = numel_of(layout)
    found, why = called("outside", lambda: [[(int(a), int(b)) for a, b in method.outside(one, layout)] for one in told])
    if found is None or any(not 0 <= start <= stop <= numel for part in found for start, stop in part):
        raise Unusable(why or "outside gave ranges that are not in the fragment")
    return list(found)
