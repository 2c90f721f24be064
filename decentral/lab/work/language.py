"""The byte-level language model of the shipped task, on evenly or unevenly shared text.

With even shares every peer draws windows from all of the text. With uneven ones each has a part of its own, one after
the other: the standard library is read in the order of its folders, so a peer has some folders and not the others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decentral.lab.work.base import OneByOne, Trained
from decentral.lab.work.stacked_llama import StackedLlama
from decentral.manifest import Manifest
from decentral.tasks.batches import window_start
from decentral.tasks.corpus import Corpus
from decentral.tasks.evaluate import bits_per_byte
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig

__all__ = ["Language"]


class Language:
    """See Work. Which bytes a step sees follows from the run's seed, the rank and the step."""

    def __init__(
        self, manifest: Manifest, corpus: Corpus, peers: int, *, uneven: bool, windows: int = 128, device: str = "cpu"
    ) -> None:
        self._manifest, self._corpus, self._windows = manifest, corpus, windows
        self._peers, self._uneven, self._device = peers, uneven, device
        self._config = LanguageModelConfig.of(manifest.model)

    def model(self) -> nn.Module:
        """See Work."""
        built: nn.Module = build_language_model(self._config, seed=self._manifest.run.seed)
        return built.to(self._device)

    @property
    def tokens_of_step(self) -> int:
        """See Work."""
        return self._manifest.data.batch_size * self._config.context

    def tokens(self, rank: int, step: int) -> Tensor:
        """The windows of a step, int64 (batch, context)."""
        begin, stop = self._part(rank)
        batch, context = self._manifest.data.batch_size, self._config.context
        seed, peer = self._manifest.run.seed, rank.to_bytes(4, "little")
        rows = range(step * batch, (step + 1) * batch)
        starts = torch.tensor([begin + window_start(seed, peer, row, stop - begin - context) for row in rows])
        return self._corpus.train[starts[:, None] + torch.arange(context)].long()

    def _part(self, rank: int) -> tuple[int, int]:
        """Where this rank's text begins and ends."""
        length = self._corpus.train.numel()
        if not self._uneven:
            return 0, length
        return length * rank // self._peers, length * (rank + 1) // self._peers

    def loss(self, module: nn.Module, rank: int, step: int) -> Tensor:
        """See Work."""
        tokens = self.tokens(rank, step).to(self._device)
        loss: Tensor = module(input_ids=tokens, labels=tokens).loss
        return loss

    def held_out(self, module: nn.Module) -> float:
        """See Work; in bits per byte."""
        held: Any = module
        return bits_per_byte(
            held, self._corpus.held_out, context=self._config.context, num_windows=self._windows, batch_size=64
        )

    def trained(self, modules: Sequence[nn.Module]) -> Trained:
        """See Work: all at once, but for mixtures, whose tokens go different ways."""
        if self._config.experts is not None or len(modules) == 1:
            return OneByOne(self, modules)
        return StackedLlama(modules, self.tokens)
