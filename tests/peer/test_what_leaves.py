"""What a peer says to another one, recorded before it is encrypted: nothing of its data, its folders or its key."""

from __future__ import annotations

import platform
import socket
from pathlib import Path

import pytest
import torch

from decentral.manifest import preset_manifest
from decentral.transport.protocols.yamux import NativeStream
from decentral.wire.frames import MAGIC
from tests.kit.problems import Swarm

TEXT = b"the quiet badger keeps her diary under the third stair. "


class Letters:
    """Foretells a letter of the text from the one before."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.text = torch.nn.Embedding(256, 256), torch.tensor(list(TEXT * 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)

    def step(self) -> float:
        loss = torch.nn.functional.cross_entropy(self.model(self.text[:-1]), self.text[1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


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
    Swarm(terms, tmp_path / "badger", Letters(), Letters()).run()
    sent = b"".join(said)
    assert sent.count(MAGIC) >= 2, "frames went through what was recorded"
    ids = torch.tensor(list(TEXT))
    assert TEXT[:12] not in sent
    for dtype in (torch.int64, torch.int32, torch.int16):
        assert ids[:6].to(dtype).numpy().tobytes() not in sent
    long = [name for name in names if len(name) >= 6]  # a shorter one is in a megabyte of weights by chance
    for private in (b"badger", str(tmp_path).encode(), str(Path.home()).encode() + b"/", *long):
        assert private not in sent
    for number in range(2):
        private_key = (tmp_path / f"badger/peer{number}/identity.key").read_bytes()[-64:-32]
        assert private_key not in sent, "its public half is the name"
