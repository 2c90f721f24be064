"""The model that is being trained, as fragments and buffers, on every process of one peer.

Rank 0 talks to the swarm; the other ranks of an accelerate world hold the same parameters and receive, at every
step boundary, one small tensor that says what changed, and the fragments that did; with fragment 0 the buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decentral.errors import ConfigError
from decentral.parameters import (
    Schema,
    buffers_of,
    gather,
    gather_buffers,
    parameters_of,
    scatter,
    scatter_buffers,
    schema_of,
)
from decentral.state.snapshot import live_buffer_name
from decentral.training.describing import description_of
from decentral.training.inner.averages import Averages

# Shape suffixes: N = elements of one fragment, B = elements of all buffers; flat float32, on the CPU.

Told = tuple[int, ...]  # whole numbers below 2**63 that all ranks must know alike


class LiveModel:
    """Reads and writes fragments of a model; knows the other ranks through accelerate.

    Of an optimizer that trains at other parameters than it learns, what is read and written is what it learns; the
    caller lets it go on with ``averages.resume``, once for all that a boundary read and wrote.
    """

    def __init__(
        self,
        model: nn.Module,
        num_fragments: int,
        accelerator: Any | None,  # Any: accelerate is untyped
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self.accelerator, self.averages = accelerator, Averages(optimizers)
        bare = model if accelerator is None else accelerator.unwrap_model(model)
        self._bare = bare
        self.schema: Schema = schema_of(bare, num_fragments)
        self._parameters = parameters_of(bare)
        self._trained = {spec.name for fragment in self.schema.fragments for spec in fragment.parameters}

    def description(self) -> dict[str, Any] | None:
        """How ``export`` can build the model again; None for one that only its script can build."""
        return description_of(self._bare, self._trained)

    @property
    def trained(self) -> dict[str, Tensor]:
        """The parameters that fragments are made of, by name."""
        specs = (spec for fragment in self.schema.fragments for spec in fragment.parameters)
        return {spec.name: self._parameters[spec.name] for spec in specs}

    @property
    def is_main(self) -> bool:
        """Whether this process talks to the swarm."""
        return self.accelerator is None or bool(self.accelerator.is_main_process)

    @property
    def world_size(self) -> int:
        """Processes of this peer."""
        return 1 if self.accelerator is None else int(self.accelerator.num_processes)

    def read(self, fragment: int) -> Tensor:
        """A copy of one fragment."""
        self.averages.show()
        return gather(self._parameters, self.schema.fragments[fragment])

    def read_all(self) -> list[Tensor]:
        """A copy of every fragment."""
        return [self.read(f) for f in range(len(self.schema.fragments))]

    def write(self, fragment: int, flat_N: Tensor) -> None:
        """Overwrite one fragment in place; optimizer state and gradients are not touched."""
        self.averages.show()
        scatter(flat_N, self.schema.fragments[fragment], self._parameters)

    def keeps(self, fragment: int) -> bool:
        """Whether reading gives the very bits that were written: not where parameters have less than float32."""
        wide = (torch.float32, torch.float64)
        return all(self._parameters[spec.name].dtype in wide for spec in self.schema.fragments[fragment].parameters)

    def read_buffers(self) -> Tensor:
        """A copy of all buffers (B,). They are looked up anew: a module may put another tensor in the place of one."""
        return gather_buffers(self._buffers(), self.schema.buffers)

    def write_buffers(self, flat_B: Tensor) -> None:
        """Overwrite all buffers in place, each in its own dtype."""
        scatter_buffers(flat_B, self.schema.buffers, self._buffers())

    def kept_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers in their own dtypes, by their names in a checkpoint."""
        return {live_buffer_name(name): buffer.detach().cpu().clone() for name, buffer in self._buffers().items()}

    def restore_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what ``kept_buffers`` gave."""
        with torch.no_grad():
            for name, buffer in self._buffers().items():
                buffer.copy_(tensors[live_buffer_name(name)])

    def frozen(self) -> dict[str, Tensor]:
        """The parameters that were not trained at the join; not to be written to."""
        return {spec.name: self._parameters[spec.name].detach() for spec in self.schema.frozen}

    def check_trained(self) -> None:
        """Raise ConfigError when other parameters are trained than at the join: the others know of no such change."""
        for name, parameter in parameters_of(self._bare).items():
            if parameter.requires_grad != (name in self._trained):
                then, now = ("not trained", "is now") if parameter.requires_grad else ("trained", "is frozen now")
                raise ConfigError(
                    f"{name} was {then} when this peer joined and {now}: what it learns would reach nobody, or its "
                    "digest is of other values; choose what is trained before join(), and a run for each choice"
                )

    def _buffers(self) -> dict[str, Tensor]:
        return buffers_of(self._bare) if self.schema.buffers else {}

    def share(self, changed: Iterable[int], done: bool, told: Told) -> tuple[bool, Told]:
        """Bring every rank in step: broadcast the changed fragments, whether the run is done, and ``told``.

        Every rank calls it at every step boundary; returns what the main process knows.
        """
        if self.world_size == 1:
            return done, told
        from accelerate.utils import broadcast

        assert self.accelerator is not None
        device = self.accelerator.device
        first = 2 + len(told)  # of the fragments
        flags = torch.zeros(first + len(self.schema.fragments), dtype=torch.int64, device=device)
        if self.is_main:
            flags[0], flags[1] = int(done), int(self.averages.shown)
            flags[2:first] = torch.tensor(told)
            for fragment in changed:
                flags[first + fragment] = 1
        flags = broadcast(flags, from_process=0).cpu()
        if flags[1]:
            self.averages.show()  # on every rank alike: to and fro rounds
        for fragment in torch.nonzero(flags[first:]).flatten().tolist():
            flat_N = broadcast(self.read(fragment).to(device), from_process=0)
            if not self.is_main:
                self.write(fragment, flat_N.cpu())
        if self.schema.buffers and flags[first]:
            flat_B = broadcast(self.read_buffers().to(device), from_process=0)
            if not self.is_main:
                self.write_buffers(flat_B.cpu())
        return bool(flags[0]), tuple(flags[2:first].tolist())
