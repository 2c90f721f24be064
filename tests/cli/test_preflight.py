"""What is wrong with terms is said before anything is made or asked of the network."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from decentral.cli import main
from decentral.manifest import preset_manifest


def test_more_fragments_than_the_model_has_blocks_are_refused_at_once(tmp_path: Path) -> None:
    terms = tmp_path / "run.toml"
    terms.write_text(preset_manifest("streaming", outer={"fragments": 5}, model={"layers": 3}).to_toml())
    result = CliRunner().invoke(main, ["start", str(terms), "--out", str(tmp_path / "new")])
    assert result.exit_code == 10
    assert "outer.fragments = 5: the 3 blocks of model.layers" in result.output
    assert not (tmp_path / "new").exists()
