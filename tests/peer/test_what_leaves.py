"""What a peer says to another one, recorded before it is encrypted: nothing of its data, its folders or its key."""

from __future__ import annotations

import platform
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import decentral
from decentral.manifest import Manifest, preset_manifest
from decentral.transport.protocols.yamux import NativeStream
from decentral.wire.frames import MAGIC

LOCAL = {"listen": ("/ip4/127.0.0.1/tcp/0",), "transport": "native", "lan": False, "quiet": True}
TEXT = b"the quiet badger keeps her diary under the third stair. "


class Letters(torch.nn.Module):
    """Foretells a letter from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(256, 256)

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.table(text[:-1]), text[1:])


def train(run: Manifest | str, out: Path, invited: Future[str]) -> None:
    torch.manual_seed(0)
    model = Letters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    text = torch.tensor(list(TEXT * 4))
    with decentral.join(run, model, optimizer, out=out, **LOCAL, alone=True) as peer:
        if isinstance(run, Manifest):
            invited.set_result(peer.invite)
        peer.wait_for_company()
        while not peer.done:
            model.loss(text).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Everything that goes into a stream of this process."""
    whole, send = list[bytes](), NativeStream.send

    async def overheard(stream: NativeStream, data: bytes | memoryview) -> None:
        whole.append(bytes(data))
        await send(stream, data)

    monkeypatch.setattr(NativeStream, "send", overheard)
    return whole


def test_neither_the_text_nor_a_name_of_the_machine_or_of_a_folder_is_sent(
    tmp_path: Path, said: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name.encode() for name in {socket.gethostname(), platform.node()}]
    for module, asked in ((socket, "gethostname"), (socket, "getfqdn"), (platform, "node")):
        monkeypatch.setattr(module, asked, lambda *given: "badgers-own-machine")
    terms = preset_manifest("sparseloco", run={"rounds": 3, "salt": "test"}, inner={"steps": 4})
    invited = Future[str]()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(train, terms, tmp_path / "badger-first", invited)
        second = threads.submit(lambda: train(invited.result(60), tmp_path / "badger-second", invited))
        first.result(100)
        second.result(100)
    sent = b"".join(said)
    assert sent.count(MAGIC) >= 2, "frames went through what was recorded"
    ids = torch.tensor(list(TEXT))
    assert TEXT[:12] not in sent
    for dtype in (torch.int64, torch.int32, torch.int16):
        assert ids[:6].to(dtype).numpy().tobytes() not in sent
    long = [name for name in names if len(name) >= 6]  # a shorter one is in a megabyte of weights by chance
    for private in (b"badger", str(tmp_path).encode(), str(Path.home()).encode() + b"/", *long):
        assert private not in sent
    for folder in ("badger-first", "badger-second"):
        assert (tmp_path / folder / "identity.key").read_bytes()[-64:-32] not in sent, (
            "the private key; its public half is the name"
        )
