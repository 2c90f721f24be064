"""The part of a model that a machine has memory to train: some fragments next to each other.

A peer that trains a part holds gradients and moments of its fragments alone, and the parameters of the others are the
anchor's own, in a file. It goes forward through all of the model, and back as far as its fragments reach. To others it
is a member that has nothing to offer in the turns of the rest, and is not waited for there.

Source of layers that stay frozen from below: Zhang et al., "TimelyFL: Heterogeneity-aware Asynchronous Federated
Learning with Adaptive Partial Training", 2023, arXiv:2304.06947.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor, nn

from decentral.errors import ConfigError
from decentral.parameters import Fragment, split
from decentral.tensors.device import PROCESSOR

__all__ = ["Borrowed", "Needs", "choose_part", "find_room"]

SPARE = 0.1  # of the memory that is free, for a batch and for others


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that training takes beside the activations of a batch; parameters are float32.

    What rounds need can lie in files (``offload``), which the kernel keeps in memory as far as there is any.
    """

    process: int = 900_000_000  # Python, torch and this package, before there is a model
    step: int = 16  # a trained parameter: itself, its gradient, two moments
    rounds: int = 8  # a parameter: the anchor, and what is owed
    turn: int = 20  # a parameter of the fragment whose turn it is, while a round is made
    mapped: int = 8  # the same in files, of which so much is read or written at a time

    def in_memory(self, sizes: Sequence[int]) -> int:
        """Return the bytes of a peer that trains all fragments of these sizes, and has all of it in memory."""
        return self.process + (self.step + self.rounds) * sum(sizes) + self.turn * max(sizes)

    def in_files(self, sizes: Sequence[int], part: range) -> int:
        """Return the bytes of a peer that trains ``part`` of them, with what rounds need in files."""
        return self.process + self.step * sum(sizes[fragment] for fragment in part) + self.mapped * max(sizes)


def choose_part(
    sizes: Sequence[int],
    memory: int,
    others: Iterable[range] = (),
    needs: Needs | None = None,
    *,
    draw: bytes = b"",
) -> range:
    """Return as many fragments as fit into ``memory`` bytes, where fewest others train.

    ``sizes``: parameters of each fragment; ``others``: the parts that other peers train. Of those that are as good one
    is taken that leaves room for as long ones beside it, by ``draw``: peers that begin at once part so, by their ids.
    ConfigError where not even one fits.
    """
    needs, everything = needs or Needs(), range(len(sizes))
    trained_by = [0] * len(sizes)
    for other in others:
        for fragment in everything[max(0, other.start) : other.stop]:
            trained_by[fragment] += 1
    for count in range(len(sizes), 0, -1):
        fits = [part for part in _parts(sizes, count) if needs.in_files(sizes, part) <= memory]
        if fits:
            drawn = int.from_bytes(blake2b(draw, digest_size=4).digest(), "little")
            return min(fits, key=lambda part: _rank(part, trained_by, drawn, len(sizes)))
    least = min(needs.in_files(sizes, part) for part in _parts(sizes, 1))
    raise ConfigError(
        f"memory = {memory / 1e9:.2f} GB: this run takes {least / 1e9:.2f} GB for one of its {len(sizes)} fragments, "
        f"and {needs.in_files(sizes, everything) / 1e9:.2f} GB for all; give more, or join a run of more fragments"
    )


def _rank(part: range, trained_by: Sequence[int], drawn: int, fragments: int) -> tuple[int, bool, int]:
    covered, places = sum(trained_by[fragment] for fragment in part), max(1, fragments // len(part))
    return covered, part.start % len(part) != 0, (part.start // len(part) - drawn) % places


def _parts(sizes: Sequence[int], count: int) -> list[range]:
    return [range(first, first + count) for first in range(len(sizes) - count + 1)]


def find_room(sizes: Sequence[int], free: int, needs: Needs | None = None) -> tuple[str, str]:
    """Say what fragments of these sizes take of ``free`` bytes, and how to take part where that is too much.

    Returns ``ok``, ``warn`` or ``fail``, and a sentence.
    """
    needs, usable = needs or Needs(), int(free * (1 - SPARE) / 1e8) * 10**8  # a tenth of a GB, which is what is said
    whole, least = needs.in_memory(sizes), min(needs.in_files(sizes, part) for part in _parts(sizes, 1))
    takes = f"all of the run's {sum(sizes) / 1e6:.1f} M parameters take {whole / 1e9:.1f} GB beside a batch"
    there = f"{free / 1e9:.1f} GB are free"
    if whole <= free:
        return "ok", f"{takes}, and {there}"
    if least > usable:
        return "fail", f"{takes}, one of its {len(sizes)} fragments {least / 1e9:.1f} GB, and {there}"
    part = choose_part(sizes, usable, needs=needs)
    is_part = len(part) < len(sizes)
    what = f"trains {len(part)} of {len(sizes)} fragments" if is_part else "has what rounds need in files"
    return "warn", f"{takes}, and {there}: join with --memory {usable / 1e9:.1f}GB, which {what}"


# ---- parameters without memory of their own ----


class Borrowed:
    """Parameters that nobody trains here, as views of what is written to them, which nobody changes.

    Of ``fragments`` all of whose parameters are float32 on the processor; those of others are copied as ever.
    """

    def __init__(self, parameters: Mapping[str, Tensor], fragments: Sequence[Fragment]) -> None:
        self._parameters, self._versions = parameters, dict[str, int]()
        named = ((fragment, [parameters[name] for name in fragment.names]) for fragment in fragments)
        self._fragments = {fragment.index: fragment for fragment, held in named if all(map(_can_borrow, held))}

    def __contains__(self, fragment: int) -> bool:
        return fragment in self._fragments

    def lend(self, fragment: int, flat_N: Tensor) -> None:
        """Have the parameters of a fragment be views of ``flat_N``."""
        found = self._fragments[fragment]
        self.put_back(dict(zip(found.names, split(flat_N, found), strict=True)))

    def values(self) -> dict[str, Tensor]:
        """Return what all of them are views of now, by name."""
        names = (name for fragment in self._fragments.values() for name in fragment.names)
        return {name: self._parameters[name].data for name in names}

    def put_back(self, values: Mapping[str, Tensor]) -> None:
        """Have them be views of these."""
        for name, value in values.items():
            self._parameters[name].data = value
            self._versions[name] = self._parameters[name]._version

    def check(self) -> None:
        """Raise ConfigError where one was changed in place, and so the anchor."""
        for name, version in self._versions.items():
            if self._parameters[name]._version != version:
                raise ConfigError(
                    f"{name} is not trained here, for want of memory, and was changed in place: an optimizer has to "
                    "leave parameters without a gradient as they are (torch's do); leave memory out, or use such a one"
                )

    def own(self, fragments: Iterable[Fragment]) -> None:
        """Give the parameters of these memory of their own, and borrow them no more."""
        for fragment in fragments:
            if self._fragments.pop(fragment.index, None) is not None:
                for name in fragment.names:
                    self._parameters[name].data = self._parameters[name].data.clone()
                    self._versions.pop(name, None)


def _can_borrow(parameter: Tensor) -> bool:
    return parameter.dtype == torch.float32 and parameter.device == PROCESSOR and type(parameter) is nn.Parameter
