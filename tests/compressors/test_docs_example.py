"""The method that docs/compressors.md shows, in a package of somebody else: found, listed, and held to every law."""

from pathlib import Path

import pytest

from tests.laws import outside

PAGE = outside.ROOT / "docs/compressors.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    outside.install(PAGE, tmp_path)
    return tmp_path


@pytest.mark.parametrize("spelling", ["ternary(cut=0.5)", "topk(k=64, chunk=4096) >> ternary(cut=0.3)"])
def test_the_example_passes_every_law_of_compressors(folder: Path, spelling: str):
    assert outside.laws(folder, "--compressor", spelling) >= 60


def test_a_package_that_is_there_is_listed_without_a_line_of_ours(folder: Path):
    listed = outside.python(folder, "-m", "decentral", "compressors")
    assert "ternary(cut=0.5)\n    bits per value 2" in listed.stdout


def test_the_example_is_short():
    assert len(outside.example(PAGE)[0].splitlines()) <= 40
