"""What an outer step may know of its round: the same on every peer, for it comes from the record."""

from dataclasses import dataclass

__all__ = ["Contributor", "RoundInfo"]


@dataclass(frozen=True, slots=True)
class Contributor:
    """One peer whose contribution a record names."""

    peer: bytes
    tokens: int = 0  # behind it, as the peer says
    steps: int = 0  # inner steps behind it, as the peer says
    age: int = 0  # outer steps of the fragment that passed since its progress began
    summary: bytes = b""  # what the method's ``summary`` made of it at its sender
    norm: float | None = None  # of its change as every peer decoded it: in a gather, where the method ``measures``


@dataclass(frozen=True, slots=True)
class RoundInfo:
    """One outer step of one fragment."""

    step: int = 0  # of this fragment, counted from 0
    contributors: tuple[Contributor, ...] = ()  # by peer id; none where a peer of a pair steps alone
    weights: tuple[float, ...] = ()  # what each counted
    shapes: tuple[tuple[int, ...], ...] = ()  # of the fragment's tensors, in order: together they are the flat vector
    names: tuple[str, ...] = ()  # of those tensors in the model
    members: int = 0  # peers of the swarm in the record's epoch, whether they contributed or not; 0 without a record
