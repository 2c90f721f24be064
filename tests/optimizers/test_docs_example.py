"""The outer optimizer that docs/own-method.md shows, in somebody else's package: found, listed, held to every law."""

from pathlib import Path

import pytest

from decentral.errors import ConfigError
from decentral.manifest import load_manifest, preset_manifest
from tests.kit import outside

PAGE = outside.ROOT / "docs/own-method.md"
OWN = 'method = "qhm"\nlearning_rate = 0.9\nnu = 0.25'
TERMS = preset_manifest("diloco").to_toml().replace('method = "diloco"', OWN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    outside.install(PAGE, tmp_path)
    return tmp_path


@pytest.mark.long
def test_the_examples_pass_every_law_of_outer_optimizers(folder: Path):
    spellings = ["qhm", "qhm lr=0.5 nu=0", "qhm nu=1", "shared_moment period=2"]
    chosen = [word for spelling in spellings for word in ("--outer", spelling)]
    assert outside.laws(folder, *chosen) >= 10 * len(spellings)


def test_a_peer_without_the_package_reads_what_to_do(tmp_path: Path):
    terms = tmp_path / "run.toml"
    terms.write_text(TERMS, encoding="utf-8")
    with pytest.raises(
        ConfigError, match="optimizer qhm is not known here; if a package adds it, install that package"
    ):
        load_manifest(terms)


AVERAGED = """
import torch
from decentral.optimizers import make_outer
from my_package import SharedMoment


class Adam:
    v = torch.full((4,), 3.0)

    def read_moment(self, name, fragment):
        return {"exp_avg_sq": self.v}.get(name)

    def write_moment(self, name, fragment, moment_N):
        self.v = moment_N
        return True


method, inner, anchor = make_outer("shared_moment", {"period": 2}), Adam(), torch.zeros(4)
assert isinstance(method, SharedMoment)
due = [[channel.name for channel in method.channels() if channel.is_due(step)] for step in range(2)]
assert due == [["change"], ["change", "exp_avg_sq"]]
assert method.states_sent(anchor, inner, 0)["exp_avg_sq"] is inner.v
mean_N, change_N = torch.full((4,), 5.0), torch.ones(4)
after, kept = method.outer_step(anchor, {"change": change_N}, method.init(anchor), None)
assert method.adopt(kept, inner, 0, {"change"}) and inner.v.tolist() == [3.0] * 4
after, kept = method.outer_step(after, {"change": change_N, "exp_avg_sq": mean_N}, kept, None)
assert method.adopt(kept, inner, 0, {"change", "exp_avg_sq"}) and inner.v.tolist() == [5.0] * 4
print(after.tolist())
"""


def test_a_package_that_is_there_is_listed_named_by_a_manifest_and_its_channel_has_a_period_of_its_own(folder: Path):
    (folder / "run.toml").write_text(TERMS, encoding="utf-8")
    read = "from decentral.manifest import load_manifest as load; o = load('run.toml').outer; print(o.method, o.hyper)"
    listed = "import sys; sys.argv[1:] = ['optimizers']; from decentral.cli import main; main()"
    done = outside.python(folder, "-c", f"{AVERAGED}\n{read}\n{listed}")
    averaged, named, *rows = done.stdout.splitlines()
    assert averaged == "[-2.0, -2.0, -2.0, -2.0]", done.stderr
    assert named == "qhm {'lr': 0.9, 'nu': 0.25, 'momentum': 0.9}"
    assert "2018, arXiv:1810.06801" in "\n".join(rows)


def test_the_examples_are_short():
    assert [len(code.splitlines()) <= 60 for code in outside.examples(PAGE)] == [True, True]
