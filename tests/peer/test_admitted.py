"""A run that admits by token, with real peers: the invite lets in, without its token one ends with code 12."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import decentral
from decentral.cli import main
from decentral.errors import NotAdmitted, UsageError
from decentral.manifest import Manifest, preset_manifest
from decentral.swarm.invite import Invite
from tests.kit.patience import until
from tests.kit.problems import joined

TOKEN = "correct-horse-battery"


@pytest.fixture
def terms() -> Manifest:
    return preset_manifest("diloco", run={"salt": "test"}, swarm={"lease": 10.0, "shrink_after": 12.0})


def peer_of(run: Manifest | str, out: Path, **given: object) -> decentral.Peer:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    loop = SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    return joined(run, loop, out, **given)


def test_who_has_the_invite_becomes_a_member_and_who_has_no_token_does_not(terms: Manifest, tmp_path: Path) -> None:
    with peer_of(terms, tmp_path / "first", admit=TOKEN) as first:
        invite = Invite.parse(first.invite)
        assert invite.token == TOKEN
        without, wrong = (str(Invite(invite.run, invite.addresses, t)) for t in (None, "another-horse-battery"))
        for stranger in (without, wrong):
            local = ["--listen", "/ip4/127.0.0.1/tcp/0", "--transport", "native", "--no-lan"]
            result = CliRunner().invoke(main, ["join", stranger, *local, "--out", str(tmp_path / "new")])
            assert result.exit_code == 12, result.output
            assert result.stderr.splitlines()[-1].startswith("error: the run admits by token, and this invite has none")
            assert not (tmp_path / "new").exists()
        with pytest.raises(NotAdmitted):
            peer_of(without, tmp_path / "script")
        with peer_of(first.invite, tmp_path / "second") as second:
            until(lambda: len(first.status().members) == 2)
            assert Invite.parse(second.invite).token == TOKEN


def test_the_token_may_come_apart_from_the_invite_once(terms: Manifest, tmp_path: Path) -> None:
    with peer_of(terms, tmp_path / "first", admit=TOKEN) as first:
        bare = first.status().invite
        assert Invite.parse(bare).token is None, "whoever observes a peer need not learn it"
        with peer_of(bare, tmp_path / "second", admit=TOKEN):
            until(lambda: len(first.status().members) == 2)
        with peer_of(bare, tmp_path / "second") as again:  # its folder has it
            assert Invite.parse(again.invite).token == TOKEN


def test_a_restart_keeps_the_door_shut_and_the_key_to_itself(terms: Manifest, tmp_path: Path) -> None:
    with peer_of(terms, tmp_path, admit=TOKEN):
        pass
    assert (tmp_path / "admission.token").stat().st_mode & 0o077 == 0
    with peer_of(terms, tmp_path) as again:
        assert Invite.parse(again.invite).token == TOKEN
    with pytest.raises(UsageError, match="holds another admission token"), peer_of(terms, tmp_path, admit="x" * 20):
        pass
