"""What is an extra is nobody's who did not ask for it."""

from __future__ import annotations

import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_libp2p_comes_with_its_extra_only_and_is_tested_by_whoever_develops_on_linux():
    assert not any("libp2p" in one for one in PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    assert extras["libp2p"] == ["libp2p==0.8.1"]  # parts of its inside are replaced: another version is another work
    assert not any("libp2p" in one for one in extras["dev"]), "make installs it where it can be built"
