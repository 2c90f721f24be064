"""A model and a text: held-out loss in bits per byte, what the model says next, a look at the text before training.

Bits per byte are what a compressor built on the model would need.
"""

from __future__ import annotations

import codecs
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from decentral.errors import DataError
from decentral.manifest.terms import Data
from decentral.tasks.corpus import check_size, chunks
from decentral.tasks.trained_model import TrainedModel


def held_out_windows(held_out: Tensor, *, context: int, num_windows: int) -> Tensor:
    """Return int64 (num_windows, context), evenly spread over the slice: the same for everybody, every time."""
    last_start = held_out.numel() - context
    if last_start < 0:
        raise DataError(
            f"the held-out slice has {held_out.numel()} bytes, one window needs {context}; "
            "name more text with --data or lower the context"
        )
    starts = [last_start * window // max(1, num_windows - 1) for window in range(num_windows)]
    return torch.stack([held_out[start : start + context] for start in starts]).long()


@torch.no_grad()
def bits_per_byte(model: Any, held_out: Tensor, *, context: int, num_windows: int = 128, batch_size: int = 16) -> float:
    """Return the mean loss of the model over fixed held-out windows, in bits per byte; 8.0 is knowing nothing.

    The model (``transformers``' causal interface, hence Any) is called in eval mode and left in the mode it
    was in.
    """
    windows = held_out_windows(held_out, context=context, num_windows=num_windows)
    batches = torch.split(windows, batch_size)
    device, training = next(model.parameters()).device, model.training
    model.eval()
    try:
        nats = math.fsum(_sum_loss(model, batch.to(device)) for batch in batches)
    finally:
        model.train(training)
    return nats / (windows.numel() - windows.shape[0]) / math.log(2)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A model on a text."""

    nats_per_token: float
    bits_per_byte: float  # comparable between models with other tokens
    num_tokens: int  # that were predicted


def evaluate_text(trained: TrainedModel, text_N: Tensor, *, num_windows: int = 128, batch_size: int = 16) -> Evaluated:
    """Return the loss of a trained model over those windows of a text, uint8 (N,), that ``bits_per_byte`` takes.

    Raises DataError for a text shorter than what the model sees at once.
    """
    windows = held_out_windows(trained.tokenizer.tokens_of(text_N), context=trained.context, num_windows=num_windows)
    device = next(trained.module.parameters()).device
    with torch.no_grad():
        nats = math.fsum(_sum_loss(trained.module, batch.to(device)) for batch in torch.split(windows, batch_size))
    num_tokens = windows.numel() - windows.shape[0]
    nbytes = sum(trained.tokenizer.nbytes_of(window[1:].tolist()) for window in windows)
    return Evaluated(nats / num_tokens, nats / nbytes / math.log(2), num_tokens)


def _sum_loss(model: Any, batch: Tensor) -> float:
    """Return the nats over all predictions of the batch; float64 sum, so the batch size hardly shows."""
    logits = model(input_ids=batch).logits[:, :-1].float()
    each = cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1), reduction="none")
    return float(each.double().sum())


# ---- what a model says next ----
#
# Token by token. Every one costs a forward pass over all that the model sees: to look at a model, and not to serve it.

# Shape suffixes: T = tokens so far, V = vocabulary.

_LOOKED_AT, _MOST_WORDS = 4096, 20  # bytes of a text, characters


def continue_text(
    module: Any,  # transformers' causal interface; it ships no types
    prompt_T: Tensor,
    *,
    num_tokens: int,
    context: int,
    temperature: float,
    generator: torch.Generator,
) -> Iterator[int]:
    """Yield ``num_tokens`` tokens after the prompt (T >= 1), of which the last ``context`` are seen.

    ``temperature`` 0 takes the likeliest each time; else it divides the logits, and one is drawn by ``generator``, the
    processor's, so that a seed gives the same text wherever the logits are the same.
    """
    token_T = prompt_T
    for _ in range(num_tokens):
        with torch.no_grad():
            logits_V = module(input_ids=token_T[None, -context:]).logits[0, -1].float().cpu()
        drawn = _drawn(logits_V, temperature, generator)
        token_T = torch.cat([token_T, drawn.to(token_T.device)])
        yield int(drawn)


def words_before(held_out_N: Tensor) -> str:
    """Return the first words of a line of a text, for a model to go on from; bytes that are no text are left out."""
    lines = bytes(held_out_N[:_LOOKED_AT].tolist()).decode(errors="ignore").splitlines()
    line = next((line for part in lines[1:] if len(line := part.strip()) >= _MOST_WORDS), "The ")  # the first is cut
    return line[: line.rfind(" ", 0, _MOST_WORDS) + 1] or line[:_MOST_WORDS]


def _drawn(logits_V: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits_V.argmax(dim=-1, keepdim=True)
    return torch.multinomial(torch.softmax(logits_V / temperature, dim=-1), 1, generator=generator)


# ---- a look at what --data names ----
#
# Before anything is started: how much it is, whether it is text, and which.
#
# The terms of a run name a corpus by a label and, where all peers are to have the same, by a digest: blake2b-256 of the
# tokens, which here are the bytes. Streamed: a chunk is in memory at a time, whatever the corpus holds.

# Shares measured: source code and UTF-8 prose 1.00, French with every tenth letter accented in Latin-1 0.81; random
# bytes, PNG and gzip 0.48, an executable 0.11.
LEAST_TEXT = 0.75
_NAMED = 3  # of the files that are passed over
_CONTROL = bytes({*range(32), 127} - set(b"\t\n\v\f\r\x1b"))
_DOMAIN = b"decentral corpus 1\n"
_NOT_UTF8 = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Survey:
    """A look at the text of ``path``; ``digest`` in hex."""

    path: Path
    num_files: int
    nbytes: int
    text_share: float  # of the bytes, those that are UTF-8 and no control characters
    digest: str
    left_out: str = ""  # what was passed over, and why

    def __str__(self) -> str:
        files, share = f"{_files(self.num_files)}{self.left_out}", f"{100 * self.text_share:.1f} % of it text"
        return f"{self.path}: {files}, {self.nbytes:,} bytes, {share}, digest {self.digest[:8]}"


def survey(path: Path) -> Survey:
    """Look through a file or a folder. Raises DataError for what cannot be trained on."""
    passed_over: list[Path] = []
    digest, decoder = hashlib.blake2b(_DOMAIN, digest_size=32), codecs.getincrementaldecoder("utf-8")("replace")
    files, nbytes, foreign = set[Path](), 0, 0
    for file, chunk in chunks(path, passed_over.append):
        files.add(file)
        digest.update(chunk)
        nbytes += len(chunk)
        foreign += len(chunk) - len(chunk.translate(None, _CONTROL)) + decoder.decode(chunk).count(_NOT_UTF8)
    left_out = _left_out(path, passed_over)
    check_size(nbytes, f"--data {path}", f" in {_files(len(files))}{left_out}" if path.is_dir() else "")
    found = Survey(path, len(files), nbytes, 1 - foreign / nbytes, digest.hexdigest(), left_out)
    if found.text_share < LEAST_TEXT:
        raise DataError(
            f"--data {path} is no text: {100 * found.text_share:.0f} % of its {nbytes} bytes are UTF-8 text, at least "
            f"{100 * LEAST_TEXT:.0f} % are needed; name text, converted to UTF-8 where it has another encoding"
        )
    return found


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def _left_out(folder: Path, files: Sequence[Path]) -> str:
    """Say what was not read of a folder, and why; empty where that is nothing."""
    if not files:
        return ""
    nbytes = sum(file.stat().st_size for file in files)
    names = ", ".join(str(file.relative_to(folder)) for file in files[:_NAMED]) + ", ..." * (len(files) > _NAMED)
    named = f"{_files(len(files))} of {nbytes:,} bytes passed over, {names}"
    return f" ({named}: zero bytes near the beginning, so no text)"


def check_agreed(terms: Data, found: Survey | None) -> str:
    """Return what is to be said about this peer's text. Raises DataError unless it is what the run trains on."""
    label, own = terms.corpus, "make a run of your own text: decentral init RUN.toml --data"
    if found is None:
        if label != "stdlib":
            raise DataError(
                f"the run trains on {label}; name your copy of it with --data PATH: ask who began the run for one "
                "(decentral init --share-text lets a run's text come by itself)"
            )
        return "this peer's text is the standard library's source"
    if label == "stdlib":
        raise DataError(
            f'data.corpus = "stdlib": the run trains on the standard library, and --data {found.path} is other text; '
            f"drop --data, or {own} {found.path}"
        )
    if terms.digest is None:
        return f"this peer's text is {found}; the run asks for no digest: each peer may bring its own {label}"
    if terms.digest != found.digest:
        raise DataError(
            f"--data {found.path} is other text than the run's {label}: its digest is {found.digest[:8]}, the run's "
            f"{terms.digest[:8]}; name the same text, or {own} {found.path}"
        )
    return f"this peer's text is {found}: the run's {label}"
