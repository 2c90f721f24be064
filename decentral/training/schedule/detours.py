"""Where fragments of the live model train on while their contributions are in flight, and the way back from there.

A method may guess what the round in progress will bring, and train on from that. What is learnt there counts, where
it began does not: when the round is decided, for this peer or without it, that is taken out again, and the commit is
merged as if training had gone on from where the contribution was taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from decentral.optimizers import carry
from decentral.training.live_side import Parameters

__all__ = ["Detours"]

# Shape suffix: N = elements of one fragment, flat float32.


class Detours:
    """By fragment."""

    def __init__(self) -> None:
        self._left_N: dict[int, Tensor] = {}  # the live parameters when the contribution was taken
        self._begun_N: dict[int, Tensor] = {}  # and what training went on from, as the model holds it
        self._untold: set[int] = set()  # fragments that were written

    def __contains__(self, fragment: int) -> bool:
        """Whether training goes on elsewhere."""
        return fragment in self._begun_N

    def live(self, model: Parameters, fragment: int) -> Tensor:
        """The live parameters had training gone on where it was: bit for bit what they were if nothing was learnt."""
        live_N = model.read(fragment)
        if fragment not in self._begun_N:
            return live_N
        return carry(live_N, self._begun_N[fragment], self._left_N[fragment])

    def go(self, model: Parameters, fragment: int, live_N: Tensor, wanted_N: Tensor | None) -> None:
        """Train on from ``wanted_N``; None: from ``live_N``, which `live` gave: back, where it was elsewhere."""
        if wanted_N is None and fragment not in self._begun_N:
            return
        self.end(fragment)
        self._untold.add(fragment)
        model.write(fragment, live_N if wanted_N is None else wanted_N)
        if wanted_N is not None:
            self._left_N[fragment], self._begun_N[fragment] = live_N, model.read(fragment)

    def end(self, fragment: int) -> None:
        """The live parameters are overwritten."""
        self._left_N.pop(fragment, None)
        self._begun_N.pop(fragment, None)

    def told(self) -> set[int]:
        """The fragments that were written since this was asked last: other ranks must have them, too."""
        untold, self._untold = self._untold, set()
        return untold

    # ---- over a restart ----

    def tensors(self) -> dict[str, Tensor]:
        """The way there, by names in a checkpoint."""
        places = (("left", self._left_N), ("begun", self._begun_N))
        return {_name_of(f, place): one_N for place, by_fragment in places for f, one_N in by_fragment.items()}

    def recall(
        self, model: Parameters, tensors: Mapping[str, Tensor], num_fragments: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Of a model that is as its checkpoint has it: each fragment that was elsewhere, and what it is without that.

        What was in flight is not any more. Whoever asks writes it.
        """
        for f in range(num_fragments):
            if _name_of(f, "begun") in tensors:
                self._left_N[f], self._begun_N[f] = (tensors[_name_of(f, place)] for place in ("left", "begun"))
                self._untold.add(f)
                yield f, self.live(model, f)


def _name_of(fragment: int, place: str) -> str:
    return f"detour/{fragment}/{place}"
