"""The outer optimizer that docs/optimizers.md shows, in somebody else's package: found, listed, held to every law."""

from pathlib import Path

import pytest

from decentral.errors import ConfigError
from decentral.manifest import load_manifest
from tests.laws import outside

PAGE = outside.ROOT / "docs/optimizers.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    outside.install(PAGE, tmp_path)
    return tmp_path


@pytest.mark.parametrize("method", ["qhm", "qhm lr=0.5 nu=0", "qhm nu=1"])
def test_the_example_passes_every_law_of_outer_optimizers(folder: Path, method: str):
    assert outside.laws(folder, "--outer", method) >= 10


def test_a_package_that_is_there_is_listed_without_a_line_of_ours(folder: Path):
    assert "2018, arXiv:1810.06801" in outside.python(folder, "-m", "decentral", "optimizers").stdout


def test_a_manifest_names_it_and_a_peer_without_the_package_reads_what_to_do(folder: Path):
    made = outside.python(folder, "-m", "decentral", "init", "run.toml", "--preset", "diloco")
    assert made.returncode == 0, made.stderr
    terms = folder / "run.toml"
    text = terms.read_text(encoding="utf-8")
    assert text.count('method = "diloco"') == 1
    terms.write_text(text.replace('method = "diloco"', 'method = "qhm"\nnu = 0.25'), encoding="utf-8")
    read = "from decentral.manifest import load_manifest as load; o = load('run.toml').outer; print(o.method, o.hyper)"
    assert outside.python(folder, "-c", read).stdout.strip() == "qhm {'nu': 0.25, 'momentum': 0.9}"
    with pytest.raises(
        ConfigError, match="optimizer qhm is not known here; if a package adds it, install that package"
    ):
        load_manifest(terms)


def test_the_example_is_short():
    assert len(outside.example(PAGE)[0].splitlines()) <= 60
