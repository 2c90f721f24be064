"""What a checkpoint or a snapshot holds of a replica: names for its tensors, and the way back.

Shared are the anchor, the outer state and the buffers, which every peer holds alike; own is the feedback, which is in
no snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from decentral.errors import PayloadError
from decentral.replica.received.senders import Kept
from decentral.state.snapshot import BUFFERS, anchor_name, outer_name

# Shape suffix: B = elements of all buffers; flat float32.

States = Sequence[Mapping[str, Tensor]]  # a fragment each
_FEEDBACK = "feedback/"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was found, a fragment each, checked and not yet taken over."""

    anchors: list[Tensor]
    states: list[dict[str, Tensor]]
    feedback: list[dict[str, Tensor]]  # this peer's own; {} where a snapshot of another is loaded
    senders: list[Kept]
    buffers_B: Tensor
    digests: list[bytes]  # of the anchors


def shared_names(anchors: Sequence[Tensor], states: States, buffers_B: Tensor | None) -> dict[str, Tensor]:
    """The tensors that every peer holds alike; ``buffers_B`` is None where the schema has none."""
    named = {anchor_name(f): anchor for f, anchor in enumerate(anchors)}
    if buffers_B is not None:
        named[BUFFERS] = buffers_B
    for f, state in enumerate(states):
        named |= {outer_name(f, key): tensor for key, tensor in state.items()}
    return named


def own_names(feedback: States) -> dict[str, Tensor]:
    """The feedback, debts for instance: this peer's alone."""
    return {feedback_name(f, name): tensor for f, own in enumerate(feedback) for name, tensor in own.items()}


def found_states(tensors: Mapping[str, Tensor], like: States) -> list[dict[str, Tensor]]:
    """The outer state of each fragment. Raises PayloadError when a tensor is missing or has another size."""
    return [
        {key: found(tensors, outer_name(f, key), tensor) for key, tensor in state.items()}
        for f, state in enumerate(like)
    ]


def found_feedback(tensors: Mapping[str, Tensor], names: Iterable[str], num_fragments: int) -> list[dict[str, Tensor]]:
    """The feedback of each fragment, as far as it is there."""
    keys = [{name: feedback_name(f, name) for name in names} for f in range(num_fragments)]
    return [{name: tensors[key] for name, key in own.items() if key in tensors} for own in keys]


def found(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """One tensor. Raises PayloadError when it is missing or has another shape or dtype than ``like``."""
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise PayloadError(f"state lacks {name} of shape {tuple(like.shape)}; use another donor or checkpoint")
    return tensor


def feedback_name(fragment: int, name: str) -> str:
    """Name of a fragment's feedback in a checkpoint; feedback is never in a snapshot."""
    return f"{_FEEDBACK}{fragment}/{name}"


def is_feedback(name: str) -> bool:
    """Whether a tensor of a checkpoint is some fragment's feedback."""
    return name.startswith(_FEEDBACK)
