"""Peers of several processes that shard their model (FSDP2): real processes, and a second peer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import decentral
from decentral.parameters import Schema, digest
from decentral.state.checkpoint import load_newest, read_checkpoint, read_frozen, unflatten
from tests.kit.patience import PATIENCE, until
from tests.peer.launched import NET, WIDTH, Blocks, Launched, launched, second_peer, terms

TOGETHER = {"company": True, "join_timeout": 60.0}
KINDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("diloco", {}, {"frozen": True}),  # a whole block, which FSDP2 shards as any other
    ("streaming", {}, {"bf16": True}),  # mixed precision, with commits merged while training goes on
    ("noloco", {}, {"shard": False}),  # DDP, by gossip
    ("sparseloco", {}, {"compiled": True, "dtype": "bfloat16"}),
    ("local_sgd", {"inner": {"optimizer": "gpa", "averaging": 0.9}}, {}),  # trains elsewhere than what peers agree on
]


@pytest.mark.parametrize("kinds", [KINDS[:2], pytest.param(KINDS[2:], marks=pytest.mark.long)])
def test_a_sharded_peer_and_one_of_a_single_process_end_with_the_same_anchor(tmp_path: Path, kinds: Any) -> None:
    tables = []
    for number, (preset, manifest, given) in enumerate(kinds):
        path = tmp_path / f"{number}.toml"
        path.write_text(terms(preset, **manifest).to_toml())
        tables.append({"run": str(path), "out": str(tmp_path / f"a{number}"), **TOGETHER, "accumulate": 2, **given})
    with launched(tmp_path / "a", 2, *tables) as a:
        others = []
        for number, (_, _, given) in enumerate(kinds):
            dtype, frozen = getattr(torch, given.get("dtype", "float32")), given.get("frozen", False)
            invite = a.wait_for(f"invite-{number}")
            others.append(second_peer(invite, tmp_path / f"b{number}", dtype, frozen=frozen))
        assert a.ends() == 0, a.said[-3000:]
    for number, (preset, _, given) in enumerate(kinds):
        found, other = a.found(number), others[number]
        assert found["anchor"] == other["anchor"] != "", preset
        assert other["contributed"] > 0, preset
        (live, moments, share, buffers), (live_1, moments_1, share_1, buffers_1) = found["ranks"]
        assert (live, moments) == (live_1, moments_1), preset
        assert 0.45 < share_1 <= share < 0.55 or given.get("shard") is False, preset
        looked = found["looked"]
        assert looked["before"] == looked["after"], preset
        assert {one for one, *_ in looked["inside"]} == {looked["agreed"]} != {looked["before"][0][0]}, preset
        if preset != "streaming":  # whose last fragment carries no buffers
            assert buffers == buffers_1, preset
        if given.get("frozen"):
            check_frozen(tmp_path / f"a{number}", Blocks(frozen=True))


def check_frozen(out: Path, model: Blocks) -> None:
    """Only what is trained is in the run's fragments; the rest is beside them, put together from its shards."""
    kept = load_newest(out / "checkpoints")
    assert kept is not None
    schema = Schema.from_json(kept.meta["parameters"])
    trained = [spec.name for fragment in schema.fragments for spec in fragment.parameters]
    assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    frozen = read_frozen(out, schema.frozen)
    assert {name.split(".")[0] for name in frozen} == {"base", "blocks"}
    assert all(torch.equal(tensor, model.get_parameter(name)) for name, tensor in frozen.items())


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_loses_one_process_ends_as_one_and_resumes_from_its_folder(tmp_path: Path, rank: int) -> None:
    manifest, ends, comes_back = tmp_path / "run.toml", dict[str, Any](), threading.Event()
    manifest.write_text(terms("sparseloco", rounds=12, inner={"steps": 2}).to_toml())
    table = {"run": str(manifest), "out": str(tmp_path / "out"), "company": True}
    with launched(tmp_path / "a", 2, table) as a:
        invite, pids = a.wait_for("invite-0"), a.pids()
        trains = lambda: ends.update(second_peer(invite, tmp_path / "b", comes_back=comes_back))  # noqa: E731
        other = threading.Thread(target=trains, daemon=True)
        other.start()
        checkpoint_of(a, tmp_path / "out", rounds=3)
        comes_back.set()  # or it comes to the end of the run alone
        os.kill(pids[rank], signal.SIGKILL)
        assert a.ends() == 1
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not children_of(tmp_path / "out")
    with launched(tmp_path / "a", 2, table) as again:
        assert again.ends() == 0, again.said[-3000:]
        found = again.found()
    other.join(30)
    assert found["begun"]["round"] >= 3
    assert found["begun"]["steps"] >= 3  # one a round at least; 5 was seen, where two a round would be 6
    assert found["ranks"][0][:2] == found["ranks"][1][:2]
    assert found["anchor"] == ends["anchor"] != ""


def checkpoint_of(peer: Launched, out: Path, rounds: int) -> None:
    """Wait until it has written one of so many rounds."""
    until(
        lambda: any(int(path.name.split("-")[-1]) >= rounds for path in (out / "checkpoints").glob("0*")),
        peer.still_runs,
    )


def children_of(out: Path) -> list[str]:
    """What of a peer in that folder still runs."""
    named = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [line for line in named if str(out) in line]


@pytest.mark.parametrize(
    "lives",
    [
        pytest.param([(1, False), (2, True), (2, True), (1, False)], id="one process, sharded", marks=pytest.mark.long),
        pytest.param([(2, False), (2, False), (2, True), (2, False)], id="copies, sharded", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_is_of_no_number_of_processes(tmp_path: Path, lives: list[tuple[int, bool]]) -> None:
    manifest, out = tmp_path / "run.toml", tmp_path / "out"
    manifest.write_text(terms("diloco", rounds=1000, inner={"steps": 4}).to_toml())
    before: dict[str, Any] | None = None
    for number, (count, shard) in enumerate(lives):
        table = {"run": str(manifest), "out": str(out), "shard": shard, "leave_at": 6 * (number + 1)}
        with launched(tmp_path / str(number), count, table) as a:
            assert a.ends() == 0, a.said[-3000:]
            found = a.found()
        if before is not None:
            begun = found["begun"]
            kept = ("anchor", "live", "moments", "steps")
            assert [begun[name] for name in kept] == [before[name] for name in kept], (count, shard)
            assert {rank[3] for rank in begun["ranks"]} == {before["ranks"][0][3]}  # buffers: the main process's
        assert len({tuple(rank[:2]) for rank in found["ranks"]}) == 1
        before = found


@pytest.mark.long
def test_ctrl_c_ends_all_processes_and_leaves_a_checkpoint_that_is_whole(tmp_path: Path) -> None:
    manifest, out = tmp_path / "run.toml", tmp_path / "out"
    manifest.write_text(terms("diloco", inner={"steps": 10**6}).to_toml())
    with launched(tmp_path / "a", 2, {"run": str(manifest), "out": str(out)}) as a:
        pids = a.pids()
        a.wait_for("trained-0")
        a.process.send_signal(signal.SIGINT)
        a.ends()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not children_of(out)
    kept = load_newest(out / "checkpoints")
    assert kept is not None
    assert any(name.startswith("training/") for name in kept.tensors)


@pytest.mark.long
def test_a_peer_of_two_processes_whose_disk_is_lost_has_its_sharded_moments_back(tmp_path: Path) -> None:
    """Its state is kept whole and comes back as parts, as from a checkpoint."""
    kept_by_one = {"redundancy": {"keepers": 1, "needed": 1, "seconds": 0.1, "megabytes": 10}}
    manifest = terms("diloco", rounds=10**6).changed(swarm=kept_by_one)
    out, invited, invite, over = tmp_path / "a", threading.Event(), list[str](), threading.Event()

    def stays() -> None:
        model, data = Blocks(), torch.Generator().manual_seed(1)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        with decentral.join(manifest, model, optimizer, out=tmp_path / "b", **NET, alone=True) as peer:
            invite.append(peer.invite)
            invited.set()
            while not over.is_set():
                model(torch.randn(8, WIDTH, generator=data)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    other = threading.Thread(target=stays, daemon=True)
    other.start()
    try:
        assert invited.wait(PATIENCE)
        table = {"run": invite[0], "out": str(out), "company": True}
        with launched(tmp_path / "first", 2, table) as a:
            a.wait_for("pids-0")
            until(lambda: len(told_in(out, "state_given")) >= 3, a.still_runs)
            a.process.send_signal(signal.SIGINT)  # leaves with a last checkpoint
            a.ends()
        lost, kept = told_in(out, "checkpoint"), tmp_path / "kept"
        assert lost
        shutil.move(out, kept)
        out.mkdir()
        shutil.copy(kept / "identity.key", out)
        with launched(tmp_path / "again", 2, {**table, "leave_at": 1}) as a:
            assert a.ends() == 0, a.said[-3000:]
            begun = a.found()["begun"]
        (back,) = told_in(out, "state_restored")
        assert back["round"] > 0
        assert begun["steps"] > 0
        assert {tuple(rank[:2]) for rank in begun["ranks"]} == {(begun["live"], begun["moments"])}
        assert begun["moments"] in {moments_in(path, begun["steps"]) for path in (kept / "checkpoints").glob("0*")}
    finally:
        over.set()
        other.join(30)


def told_in(out: Path, name: str) -> list[dict[str, Any]]:
    """Events of a folder."""
    path = out / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


def moments_in(checkpoint: Path, steps: int) -> str:
    """The digest of what the inner optimizer held, as `launched` makes it; empty where it had made other steps."""
    tensors, meta = read_checkpoint(checkpoint)
    if meta["inner_steps"] != steps:
        return ""
    (optimizer,) = unflatten(meta["training"], tensors)["optimizer"]
    states = [one for number in sorted(optimizer["state"]) for _, one in sorted(optimizer["state"][number].items())]
    return digest(torch.cat([torch.zeros(1), *(one.float().flatten() for one in states)])).hex()
