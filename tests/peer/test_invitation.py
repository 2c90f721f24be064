"""From an invite to its manifest."""

from pathlib import Path

import pytest

from decentral.errors import InviteError
from decentral.peer.invitation import fetch
from decentral.swarm.invite import Invite


def test_an_invite_that_leads_to_nobody_is_refused_at_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(InviteError, match="nobody who is in it; ask for a fresh one"):
        fetch(Invite(bytes(32), ()), out, None, None)
    assert not out.exists()
