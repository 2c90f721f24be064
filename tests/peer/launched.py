"""Peers of several processes, by ``accelerate launch``, for the tests: what to run is a table, what came of it another.

``python -m tests.peer.launched FOLDER`` is one of the processes. accelerate shards models on accelerators only, so its
FSDP2 is turned on by hand: from there on it is accelerate's own code, over gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import decentral
from decentral.manifest import Manifest, load_manifest
from decentral.parameters.schema import local_part, whole_of
from decentral.training.inner import build_inner
from tests.kit.patience import PATIENCE, pause
from tests.kit.problems import LOOPBACK, run_terms

ROOT = Path(__file__).parents[2]
WIDTH = 12
NET: dict[str, Any] = {"listen": LOOPBACK, "lan": False, "quiet": True, "transport": "native"}


class Block(nn.Module):
    """An odd number of rows, so that the shards differ."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.LayerNorm(WIDTH)
        self.outer = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.outer(torch.relu(self.inner(self.norm(inputs))))


class Blocks(nn.Module):
    """Two blocks, a head, buffers, and a parameter that is not trained; ``frozen``: nor is the first block."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, frozen: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.blocks, self.batch = nn.ModuleList([Block() for _ in range(2)]), nn.BatchNorm1d(WIDTH, affine=False)
        self.head = nn.Linear(WIDTH, 1)
        self.base = nn.Parameter(torch.empty(WIDTH, WIDTH), requires_grad=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        self.to(dtype)
        if frozen:
            self.blocks[0].requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs @ self.base + inputs
        for block in self.blocks:
            hidden = block(hidden)
        known = self.batch(hidden.to(self.batch.running_mean.dtype))  # buffers keep their dtype in mixed precision
        return self.head(known.to(hidden.dtype))


def terms(preset: str, rounds: int = 3, **tables: Any) -> Manifest:
    swarm = {"deadline_floor": 1.0, "lease": 20.0, "shrink_after": 25.0}
    inner = {"steps": 6, "learning_rate": 1e-3, **tables.pop("inner", {})}
    return run_terms(preset, run={"rounds": rounds}, inner=inner, swarm=swarm, **tables)


# ---- in a test ----


class Launched:
    """The processes of one peer."""

    def __init__(self, folder: Path, count: int, *tables: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        (folder / "tables.json").write_text(json.dumps(tables))
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(count)]
        launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        launch += ["--multi_gpu", "--main_process_port", "0"] if count > 1 else []
        for name in ("pids", "found", "trained"):
            for path in folder.glob(f"{name}-*"):
                path.unlink()
        with (folder / "said").open("w") as said:
            self.process = subprocess.Popen(
                [*launch, "-m", "tests.peer.launched", str(folder)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)},
                cwd=ROOT,
                stdout=said,
                stderr=said,
            )

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def pids(self) -> list[int]:
        """Of the processes, by rank, once they take part."""
        return [int(self.wait_for(f"pids-{rank}")) for rank in range(2)]

    def wait_for(self, name: str, within: float = PATIENCE) -> str:
        """The text of a file that one of the processes writes whole."""
        path, end = self.folder / name, time.monotonic() + within
        while not path.exists():
            assert self.process.poll() is None or path.exists(), self.said[-4000:]
            assert time.monotonic() < end, f"no {name}: {self.said[-4000:]}"
            wait(0.05)
        return path.read_text()

    def still_runs(self) -> None:
        assert self.process.poll() is None, self.said[-3000:]
        pause()

    def ends(self, within: float = PATIENCE) -> int:
        """Its exit code."""
        return self.process.wait(within)

    def found(self, number: int = 0) -> dict[str, Any]:
        """What came of one of the tables."""
        return json.loads((self.folder / f"found-{number}").read_text())


@contextmanager
def launched(folder: Path, count: int, *tables: dict[str, Any]) -> Iterator[Launched]:
    """Ends with the block, however that ends."""
    started = Launched(folder, count, *tables)
    try:
        yield started
    finally:
        started.process.terminate()  # the launcher ends its processes
        started.process.wait(PATIENCE)


def wait(seconds: float) -> None:
    """Other processes do what they do meanwhile."""
    threading.Event().wait(seconds)


def second_peer(
    invite: str,
    out: Path,
    dtype: torch.dtype = torch.float32,
    comes_back: threading.Event | None = None,
    *,
    frozen: bool = False,
) -> dict[str, Any]:
    """A peer of one process, in the test's, until the run is over; it waits for the other one that comes back."""
    model, data = Blocks(dtype, frozen=frozen), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1)
    with decentral.join(invite, model, optimizer, out=out, **NET, alone=True) as peer:
        while not peer.done:
            while comes_back is not None and comes_back.is_set() and len(peer.status().members) < 2:
                wait(0.1)
            model(torch.randn(8, WIDTH, generator=data).to(dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {"anchor": peer.anchor_digest, "contributed": peer.status().rounds_contributed}


# ---- one of the processes ----


def main(folder: Path) -> None:
    from accelerate import Accelerator

    tables = json.loads((folder / "tables.json").read_text())
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=tables[0].get("accumulate", 1))
    for number, table in enumerate(tables):
        found = train(accelerator, folder, number, **table)
        if accelerator.is_main_process:
            write(folder / f"found-{number}", json.dumps(found))
    accelerator.wait_for_everyone()


def write(path: Path, text: str) -> None:
    temporary = path.with_name(f"writing-{path.name}-{os.getpid()}")
    temporary.write_text(text)
    temporary.rename(path)


def train(
    accelerator: Any,
    folder: Path,
    number: int,
    *,
    run: str,
    out: str,
    shard: bool = True,
    bf16: bool = False,
    dtype: str = "float32",
    compiled: bool = False,
    accumulate: int = 1,
    leave_at: int = 0,
    company: bool = False,
    frozen: bool = False,
    **given: Any,
) -> dict[str, Any]:
    torch.manual_seed(accelerator.process_index)
    model = Blocks(getattr(torch, dtype), frozen=frozen)
    inner = load_manifest(run).inner if run.endswith(".toml") else None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    (optimizer,) = (
        build_inner(inner, model) if inner is not None else [torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)]
    )
    model, optimizer = prepared(accelerator, model, optimizer, shard=shard, bf16=bf16)
    if compiled:
        model = torch.compile(model, backend="aot_eager")
    data = torch.Generator().manual_seed(100 + accelerator.process_index)
    found: dict[str, Any] = {}
    with decentral.join(
        run, model, optimizer, accelerator=accelerator, out=out, checkpoint_every=1, **NET, **given, alone=True
    ) as peer:
        found["begun"] = {"anchor": peer.anchor_digest, **held(accelerator, model, optimizer), "round": peer.round}
        found["begun"]["steps"] = peer.inner_steps
        write(folder / f"pids-{accelerator.process_index}", str(os.getpid()))
        if accelerator.is_main_process:
            write(folder / f"invite-{number}", peer.invite)
        if company:
            peer.wait_for_company()
        while not peer.done:
            for _ in range(accumulate):
                with accelerator.accumulate(model) if accumulate > 1 else nullcontext():
                    loss = model(torch.randn(8, WIDTH, generator=data).to(getattr(torch, dtype))).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            if peer.inner_steps == 5 and "looked" not in found:
                found["looked"] = looked(accelerator, peer, model, optimizer)
            if peer.inner_steps == 5:
                write(folder / f"trained-{accelerator.process_index}", "")
            if leave_at and peer.inner_steps >= leave_at:
                peer.leave()
                leave_at = 0
        found["steps"], found["anchor"] = peer.inner_steps, peer.anchor_digest
    found |= held(accelerator, model, optimizer)
    found["frozen"] = whole_of(accelerator.unwrap_model(model).base).float().sum().item()
    return found


def looked(accelerator: Any, peer: Any, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What the model holds beside what is agreed, while that is in it, and afterwards; asked of all processes.

    Once more where a commit came meanwhile.
    """
    from accelerate.utils import gather_object

    while True:
        agreed = agreed_by(accelerator, peer, model)
        before = held(accelerator, model, optimizer)
        with peer.evaluating():
            inside = held(accelerator, model, optimizer)
            model(torch.randn(8, WIDTH).to(next(model.parameters()).dtype))  # which puts shards together
        after = held(accelerator, model, optimizer)
        if all(gather_object([agreed == agreed_by(accelerator, peer, model)])):
            return {"before": before["ranks"], "inside": inside["ranks"], "after": after["ranks"], "agreed": agreed}


def agreed_by(accelerator: Any, peer: Any, model: nn.Module) -> str:
    """The digest of what is trained of it, on the main process; empty on the others."""
    if not accelerator.is_main_process:
        return ""
    from decentral.parameters import digest

    bare, named = accelerator.unwrap_model(model), peer.agreed()
    wanted = [name.replace("_orig_mod.", "") for name, one in bare.named_parameters() if one.requires_grad]
    return digest(torch.cat([named[name].float().flatten() for name in wanted])).hex()


def held(accelerator: Any, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What all processes hold together, and whether each has its part of it only."""
    from accelerate.utils import gather_object

    from decentral.parameters import digest

    bare = accelerator.unwrap_model(model)
    trained = [parameter for parameter in bare.parameters() if parameter.requires_grad]
    live = digest(torch.cat([whole_of(parameter).float().flatten() for parameter in trained])).hex()
    inner = getattr(optimizer, "optimizer", optimizer)
    states = [one for p in trained for _, one in sorted(inner.state.get(p, {}).items()) if torch.is_tensor(one)]
    moments = digest(torch.cat([torch.zeros(1), *(whole_of(one).float().flatten() for one in states)])).hex()
    share = sum(local_part(p).numel() for p in trained) / sum(p.numel() for p in trained)
    buffers = sum(buffer.double().sum().item() for buffer in bare.buffers())
    ranks = gather_object([[live, moments, round(share, 2), buffers]])
    return {"ranks": ranks, "live": live, "moments": moments}


def prepared(accelerator: Any, model: nn.Module, optimizer: Any, *, shard: bool, bf16: bool) -> Any:
    """By accelerate: sharded by its FSDP2, or as it does by itself."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: TID251
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: TID251

    state, before = accelerator.state, accelerator.state.distributed_type
    if shard:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy=ModuleWrapPolicy({Block}), cpu_ram_efficient_loading=False
        )
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else None
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    try:
        return accelerator.prepare(model, optimizer)
    finally:
        if not shard:
            state.distributed_type = before


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # torch's threads of the ended process group abort an interpreter that goes down, now and then
