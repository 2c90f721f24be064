"""What is wrong with terms is said before anything is made or asked of the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from decentral.cli.preflight import Before, undo_on_error
from decentral.errors import ConfigError, FolderInUse


def make_and_refuse(folder: Path, error: type[ConfigError]) -> None:
    with undo_on_error(folder, Before.of(folder)):
        folder.mkdir()
        (folder / "text.begun").touch()  # a URL answered, and sent nothing
        (folder / "identity.key").write_bytes(b"the key of whoever made the folder")
        raise error("refused")


@pytest.mark.parametrize(("error", "stays"), [(ConfigError, False), (FolderInUse, True)])
def test_a_refused_start_takes_back_what_it_made_and_nothing_of_the_peer_that_was_there_first(
    tmp_path: Path, error: type[ConfigError], stays: bool
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(error, match="refused"):
        make_and_refuse(folder, error)
    assert (folder / "identity.key").exists() == folder.exists() == stays
