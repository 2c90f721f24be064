"""One real peer: ``join()``, real store, real daemon, a Llama of one layer over bytes. Runs in a fork of the zygote.

SIGTERM: leave politely. SIGUSR1: step the wall clock by the seconds in ``OUT/clock``. Everything else happens to it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from decentral.cli.group import describe_failure
from decentral.compressors import parse_compressor, parse_feedback
from decentral.manifest import Manifest, load_manifest
from decentral.peer import Peer, join
from decentral.replica.codec import Codec
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig
from tests.chaos import clock
from tests.chaos.terms import terms

TEXT = b"the quick brown fox jumps over the lazy dog. " * 50


def prepare() -> None:
    """Import, compile and build once what every fork needs; nothing here starts a thread."""
    torch.set_num_threads(1)
    manifest = terms("sparseloco", seed=0)
    Codec(parse_compressor(manifest.compressor.chain), parse_feedback(manifest.compressor.feedback)).warm_up()
    build(manifest)
    import hivemind  # noqa: F401 - imported here so that no fork has to


def build(manifest: Manifest) -> torch.nn.Module:
    return build_language_model(LanguageModelConfig.of(manifest.model), seed=manifest.run.seed)


def main(order: dict[str, Any]) -> int:
    """Train until told to leave; the exit code is the one that ``decentral`` would end with."""
    try:
        _live(order)
    except BaseException as error:  # noqa: BLE001 - what ends a peer is said in one line and a code
        line, code = describe_failure(error)
        with suppress(OSError):  # what is said goes to the disk that may be full
            sys.stderr.write(f"error: {line}\n")
            if code == 1:
                sys.excepthook(type(error), error, error.__traceback__)
        return code
    return 0


def _live(order: dict[str, Any]) -> None:
    began = time.monotonic()
    out = Path(order["out"])
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    signal.signal(signal.SIGUSR1, lambda *_: clock.step(float((out / "clock").read_text())))
    manifest = load_manifest(out / "run.toml")
    model = build(manifest)
    optimizer = torch.optim.AdamW(model.parameters(), lr=manifest.inner.learning_rate)
    peer = join(
        order["invite"] or manifest,
        model,
        optimizer,
        out=out,
        listen=(order["listen"],) if order["listen"] else None,
        relays=order.get("relays", ()),
        checkpoint_every=order["checkpoint_every"],
        tokens_per_step=manifest.data.batch_size * manifest.model.context,
        alone=True,
    )
    with peer:
        _say(event="ready", wall=time.monotonic() - began, cpu=_cpu())
        _train(peer, model, optimizer, order, leaving)


def _train(peer: Peer, model: Any, optimizer: Any, order: dict[str, Any], leaving: threading.Event) -> None:
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(order["seed"])
    width = peer.manifest.model.context
    while not peer.done:
        starts = torch.randint(len(text) - width, (peer.manifest.data.batch_size,), generator=generator)
        batch = torch.stack([text[start : start + width] for start in starts.tolist()])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if leaving.wait(order["pause"]):
            peer.leave()


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _say(**news: Any) -> None:
    sys.stdout.write(json.dumps(news) + "\n")
    sys.stdout.flush()
