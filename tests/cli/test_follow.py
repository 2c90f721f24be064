"""``decentral follow`` and ``decentral relay --keep`` as people run them, over real transports on loopback."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import decentral
from decentral.cli.demo_processes import DemoProcess, Family
from decentral.cli.relaying import Keeping, follower_address
from decentral.errors import UsageError
from decentral.observe.events import read_events
from decentral.observe.status import read_status
from decentral.state.delta import apply_delta
from decentral.swarm.invite import Invite
from tests.cli.conftest import Run
from tests.kit.families import INVITE, NET, NOBODY, OVER, write_terms
from tests.kit.patience import PATIENCE, until


def terms_of(folder: Path, rounds: int) -> list[str]:
    write_terms(
        folder, rounds, inner={"steps": 40}, swarm={"deadline_ceiling": 10.0, "lease": 6.0, "shrink_after": 8.0}
    )
    return ["--data", str(folder / "text"), *NET]


def start(family: Family, tmp_path: Path, name: str, *typed: str) -> DemoProcess:
    return family.start(name, tmp_path / name, [*typed, "--out", str(tmp_path / name)])


def latest(follower: DemoProcess) -> dict[str, Any]:
    path = follower.directory / "anchors/latest.json"
    return dict(json.loads(path.read_text())) if path.exists() else {"round": -1}


def shapes(follower: DemoProcess) -> dict[str, torch.Size]:
    tensors = load_file(follower.directory / "anchors" / latest(follower)["file"])
    return {name: tensor.shape for name, tensor in tensors.items()}


def committed(peer: DemoProcess) -> dict[int, str]:
    """Digests of the anchors by round, as a peer tells them."""
    return {row["outer_step"]: row["anchor"] for row in read_events(peer.directory, event="commit")}


@pytest.mark.long
def test_a_follower_writes_anchors_while_its_first_donor_is_killed_and_goes_on_in_its_folder(
    family: Family, tmp_path: Path
) -> None:
    terms = terms_of(tmp_path, rounds=10**6)
    first = start(family, tmp_path, "first", "start", str(tmp_path / "run.toml"), *terms)
    invite = first.first_line(PATIENCE).split()[2]
    second = start(family, tmp_path, "second", "join", invite, *terms)
    typed = ("follow", invite, *NET, "--every", "2", "--keep", "2", "--delta", "--relay", NOBODY)
    follower = start(family, tmp_path, "follower", *typed)
    until(lambda: latest(follower).get("delta") is not None)
    with decentral.follow(invite, out=tmp_path / "rollouts", transport="native", lan=False, listen=NET[1:2]) as anchors:
        found = [anchor for anchor, _ in zip(anchors, range(2), strict=False)]
    assert found[0].round < found[1].round
    until(lambda: found[1].round in committed(second))
    assert found[1].digest == committed(second)[found[1].round]
    assert {name: tensor.shape for name, tensor in found[1].state_dict().items()} == shapes(follower)
    assert {member["peer"] for member in read_status(follower.directory).members} == {
        read_status(peer.directory).peer for peer in (first, second)
    }
    assert read_status(follower.directory).bytes_received > 0
    told = "relay 127.0.0.1:1 does not answer"
    until(lambda: read_status(follower.directory).health.endswith(told))
    assert f"\nwarning: {told}" in (follower.directory / "stderr.txt").read_text()
    first.kill()
    before = latest(follower)["round"]
    until(lambda: latest(follower)["round"] >= before + 6)
    follower.process.send_signal(signal.SIGINT)
    assert follower.process.wait(PATIENCE) == 130
    assert "the same command goes on from" in (follower.directory / "stderr.txt").read_text()

    found, folder = latest(follower), follower.directory / "anchors"
    wanted = {found["file"], found["delta"]["file"], "latest.json"}
    names = {path.name for path in folder.iterdir()}
    assert wanted <= names
    assert len([name for name in names if name.endswith(".safetensors")]) == 2
    assert found["digest"] == committed(second)[found["round"]]
    base = load_file(folder / f"round-{found['delta']['since']:06d}.safetensors")
    there = apply_delta(base, (folder / found["delta"]["file"]).read_bytes())
    assert all(tensor.equal(there[name]) for name, tensor in load_file(folder / found["file"]).items())

    follower = start(family, tmp_path, "follower", *typed)
    until(lambda: latest(follower)["round"] > found["round"])
    synced = [row for row in read_events(follower.directory, event="synced")]
    assert len(synced) == 1, "by the commits that were missed, not by another snapshot"
    told = [row for row in read_events(second.directory) if row["event"] in ("commit", "membership")]
    assert max(len(row["members"]) for row in told) == 2, "the follower is no member"


@pytest.mark.long
def test_who_comes_when_all_peers_have_gone_gets_the_last_anchor_from_the_relay(
    family: Family, run: Run, tmp_path: Path
) -> None:
    terms = terms_of(tmp_path, rounds=3)
    first = start(family, tmp_path, "first", "start", str(tmp_path / "run.toml"), *terms)
    invite = first.first_line(PATIENCE).split()[2]
    kept = tmp_path / "kept" / Invite.parse(invite).run.hex()[:8]
    typed = ["relay", "--listen", NET[1], "--identity", str(tmp_path / "relay.key")]
    relay = family.start("relay", tmp_path / "relay", [*typed, "--keep", invite, "--keep-in", str(tmp_path / "kept")])
    until(lambda: (kept / "anchors/latest.json").exists())
    second = start(family, tmp_path, "second", "join", invite, *terms)
    assert first.process.wait(PATIENCE) == second.process.wait(PATIENCE) == 0
    until(lambda: json.loads((kept / "anchors/latest.json").read_text())["final"])
    until(lambda: "This run is over" in (relay.directory / "stderr.txt").read_text())

    late = run("join", read_status(kept).invite, *terms, "--out", "late")
    assert late.exit_code == 0, late.stderr
    assert late.stderr.splitlines() == ["looking for the run's peers ...", OVER.format("late")]
    assert late.stdout == "", "whom an invite would lead to is gone when it is read"
    status, found = read_status(tmp_path / "late"), json.loads((kept / "anchors/latest.json").read_text())
    assert status.inner_steps == 0
    assert status.anchor_digest == found["digest"] == committed(second)[3]
    assert found["round"] == 3
    assert run("export", "late", "--to", "model").exit_code == 0

    relay.process.send_signal(signal.SIGTERM)
    assert relay.process.wait(PATIENCE) == 143
    assert family.count_strays() == 0
    over = run("follow", invite, *NET, "--out", kept, "--json")
    assert over.exit_code == 0, over.stderr
    assert "This run is over: its last anchor is" in over.stderr
    assert over.stdout == "", "it is written already"


def test_a_relay_keeps_a_few_runs_and_each_once(tmp_path: Path) -> None:
    invites = [str(Invite(bytes([n]) * 32, Invite.parse(INVITE).addresses)) for n in range(5)]
    with pytest.raises(UsageError, match="5 runs, a relay keeps 4 at most"):
        Keeping(tuple(invites), tmp_path, 1).check()
    with pytest.raises(UsageError, match="of the same run"):
        Keeping((invites[0], invites[0]), tmp_path, 1).check()
    Keeping(tuple(invites[:4]), tmp_path, 1).check()
    assert follower_address("/ip4/0.0.0.0/tcp/4001", 1) == "/ip4/0.0.0.0/tcp/4003"
    assert follower_address("/ip4/127.0.0.1/tcp/0", 1) == "/ip4/127.0.0.1/tcp/0"
