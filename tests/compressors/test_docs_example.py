"""The method that docs/compressors.md shows, in a package of somebody else: found, listed, and held to every law."""

from pathlib import Path

import pytest

from decentral.errors import ConfigError
from decentral.manifest import load_manifest, preset_manifest
from decentral.manifest.presets import check_methods
from tests.kit import outside

CHAIN = "topk(k=64, chunk=4096) >> ternary(cut=0.3)"
PAGE = outside.ROOT / "docs/compressors.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    outside.install(PAGE, tmp_path)
    return tmp_path


@pytest.mark.long
def test_the_example_passes_every_law_of_compressors(folder: Path):
    assert outside.laws(folder, "--compressor", "ternary(cut=0.5)", "--compressor", CHAIN) >= 120


def test_a_package_that_is_there_is_listed_and_named_by_a_manifest_and_a_peer_without_it_reads_what_to_do(folder: Path):
    terms = folder / "run.toml"
    plain = preset_manifest("sparseloco").to_toml()
    own = plain.replace('chain = "topk(k=64, chunk=4096) >> signmag2"', f'chain = "{CHAIN}"')
    assert own != plain
    terms.write_text(own, encoding="utf-8")
    read = "from decentral.manifest import load_manifest as load; from decentral.manifest.presets import check_methods"
    named = f"{read}; m = load('run.toml'); check_methods(m); print(m.compressor.chain)"
    listed = "import sys; sys.argv[1:] = ['compressors']; from decentral.cli import main; main()"
    done = outside.python(folder, "-c", f"{named}; {listed}")
    assert done.stdout.startswith(f"{CHAIN}\n"), done.stderr
    assert "ternary(cut=0.5)\n    bits per value 2" in done.stdout
    with pytest.raises(ConfigError, match=r"ternary.*install that package"):
        check_methods(load_manifest(terms))


def test_a_hyper_parameter_out_of_its_range_is_one_line_that_says_the_range(folder: Path):
    done = outside.python(folder, "-m", "decentral", "init", "run.toml", "--compressor", "ternary(cut=2)")
    assert done.returncode == ConfigError.exit_code
    assert "ternary(cut=2): cut, a share of the largest magnitude, must be in [0, 1)" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_the_example_is_short():
    (code,) = outside.examples(PAGE)
    assert len(code.splitlines()) <= 60
