"""A study as a Python call is the study of a file, with things that a researcher brings."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from decentral import compressors, lab, optimizers, plugins
from decentral.cli import main
from decentral.compressors import Int8
from decentral.errors import ConfigError, UsageError
from decentral.lab import own
from decentral.lab.call import Declared
from decentral.lab.own import OwnWork, digest_of
from decentral.lab.plan import Plan
from decentral.lab.terms import parse_study
from decentral.manifest import preset_manifest
from decentral.optimizers.diloco import DiLoCo
from tests.lab.own_things import Halfway, Line, OfPeers

SMALL = {"learning_rates": [0.05], "seeds": [1, 2], "rounds": 2, "peers": 2, "inner": {"steps": 3, "warmup": 0}}
HERE = "tests.lab.own_things"
FILE = f"""
[study]
name = "mine"
task = "{HERE}:Line"
peers = 2
rounds = 2
learning_rates = [0.05]
seeds = [1, 2]

[inner]
steps = 3
warmup = 0

[[method]]
name = "half"
preset = "{HERE}:Halfway"

[[reference]]
name = "alone"
kind = "alone"
"""


@pytest.fixture(autouse=True)
def _brings_nothing_to_other_tests() -> Iterator[None]:
    yield
    here = own.brought()
    for known in (here.tasks, here.methods, here.compressors, optimizers._methods().brought):
        known.clear()
    compressors._METHODS.brought.clear()


def declared(**more: object) -> Declared:
    return lab.study([Halfway(), "diloco"], **({"task": Line, **SMALL} | more))


def test_the_call_gives_the_study_that_its_file_does() -> None:
    made = lab.study(
        {"half": Halfway(lr=0.25), "plain": {"preset": DiLoCo(lr=0.5), "compressor": Int8(block=64)}},
        task=Line,
        **SMALL,
        grid={"peers": [2, 3]},
        links=[{"name": "home", "rate_mbit": 20}],
        margin=0.01,
    )
    assert made.study == parse_study(made.text)
    half, plain = made.study.method
    assert half.outer == {"learning_rate": 0.25}
    assert (plain.preset, plain.outer["learning_rate"]) == ("diloco", 0.5)
    assert plain.compressor == {"chain": "int8(block=64)"}


def test_ones_own_things_are_run_here_as_in_other_processes() -> None:
    rows = declared().run(workers=0).rows
    assert [row["name"] for row in rows] == ["Halfway", "diloco", "data-parallel", "alone"]
    assert rows[0]["losses"] == declared().run(workers=1).rows[0]["losses"]
    assert rows[0]["losses"][1] != rows[0]["losses"][2]


def test_what_a_folder_keeps_is_not_run_again_unless_the_class_is_another(tmp_path: Path) -> None:
    class Mine(Line):
        steepness = 1

    first = declared(task=Mine).run(out=tmp_path, workers=0)
    assert (first.ran, declared(task=Mine).run(out=tmp_path, workers=0).ran) == (8, 0)
    Mine.steepness = 2
    assert declared(task=Mine).run(out=tmp_path, workers=0).ran == 8


def test_a_digest_is_of_code_and_of_what_an_object_holds() -> None:
    def task(factor: float) -> object:
        class Same(Line):
            def loss(self, model, rank, step, batch=8):
                return super().loss(model, rank, step, batch) * 2

        made = Same()
        made.factor, made.text = factor, torch.arange(3)
        return made

    assert digest_of(task(1.0)) == digest_of(task(1.0)) != digest_of(task(2.0))
    assert digest_of(Line) != digest_of(OfPeers)


@dataclass(frozen=True, slots=True)
class Slotted:
    size: int


def with_keyword(size: int) -> type:
    class Known:
        def model(self, *, width: int = size) -> int:
            return width

    return Known


def around(size: int) -> type:
    class Known:
        def model(self) -> int:
            return size

    return Known


def holding(value: object) -> object:
    class Known:
        pass

    known = Known()
    known.value = value  # type: ignore[attr-defined]
    return known


PAIRS = [
    (Slotted(16), Slotted(32)),
    (with_keyword(8), with_keyword(64)),
    (around(8), around(64)),
    (holding([8]), holding([64])),
    (holding({"layers": 8}), holding({"layers": 64})),
    (holding(Slotted(8)), holding(Slotted(64))),
    (holding(torch.ones(2).to_sparse()), holding(torch.zeros(2).to_sparse())),
]


@pytest.mark.parametrize("pair", PAIRS, ids=range(len(PAIRS)))
def test_whatever_decides_a_number_is_in_the_digest(pair: tuple[object, object]) -> None:
    """A cell of another task was shown in its place."""
    one, other = pair
    assert digest_of(one) == digest_of(one) != digest_of(other)


def test_two_studies_of_one_process_have_each_their_own_task() -> None:
    def tasks(value: float) -> object:
        class Mine(Line):
            def held_out(self, model: torch.nn.Module) -> torch.Tensor:
                return torch.tensor(value)

        return Mine()

    first, second = (lab.study(["diloco"], task=tasks(value), **SMALL) for value in (1.0, 2.0))
    assert {row["loss"] for row in first.run().rows} == {1.0}
    assert {row["loss"] for row in second.run().rows} == {2.0}
    plain = lab.study(["diloco"], **SMALL)
    assert plain.brought.tasks == {}


def test_an_aim_that_is_unset_is_in_no_file() -> None:
    assert tomllib.loads(lab.study(["diloco"], base=None, **SMALL).text)["study"].get("base") is None


def test_what_is_of_a_notebook_stays_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Line, "__module__", "__main__")
    with pytest.raises(UsageError, match=r"^workers=2: Line is defined in this notebook or script.*leave workers out$"):
        declared().run(workers=2)
    assert declared(seeds=[1]).run().ran == 4


def test_a_table_is_rows_a_page_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    table = declared().run(workers=0)
    half, _, together, alone = table.rows
    losses = half["losses"]
    assert half["to_alone"] == pytest.approx(sum(losses[s] - alone["losses"][s] for s in losses) / 2)
    assert half["to_data_parallel"] == pytest.approx(sum(losses[s] - together["losses"][s] for s in losses) / 2)
    assert alone["to_alone"] == 0
    assert "squared metres" in str(table)
    assert table._repr_html_().count("<tr>") == 5
    monkeypatch.setattr("decentral.lab.call.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install pandas"):
        table.to_pandas()
    if importlib.util.find_spec("pandas") is not None:
        monkeypatch.undo()
        assert list(table.to_pandas()["name"]) == ["Halfway", "diloco", "data-parallel", "alone"]


def test_a_file_names_them_too_and_its_folder_is_a_study(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(FILE)
    typed = ["lab", str(tmp_path / "study.toml"), "--out", str(tmp_path / "kept"), "--workers", "1"]
    first = CliRunner().invoke(main, typed)
    assert first.exit_code == 0, first.output
    assert "| half | learning rate 0.05 |" in first.stdout
    assert "| no such reference |" in first.stdout  # it has no data-parallel one
    again = CliRunner().invoke(main, ["lab", str(tmp_path / "kept")])
    assert f"0 cells were run; all is in {tmp_path / 'kept'}" in again.stdout


def test_a_package_adds_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("line", f"{HERE}:Line", "decentral.tasks")])
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: points.select(**wanted))
    assert Plan(parse_study(FILE.replace(f"{HERE}:Line", "line"))).size() == 4


def test_a_class_that_asks_for_them_gets_the_terms_and_the_peers() -> None:
    name = own.bring_task(OfPeers)
    terms = preset_manifest("diloco", run={"seed": 7}, model={"task": "custom"})
    assert OwnWork(name, terms, 3)._task.scale == 21


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"methods": "dilco"}, "dilco: preset 'dilco' does not exist; did you mean diloco"),
        ({"methods": [Line]}, "is no outer method"),
        ({"learning_rates": 0.1}, "study.learning_rates = 0.1"),
        ({"inner": 3}, "inner = 3"),
        ({"task": 3}, "task int has no model"),
        ({"bas": "x"}, "unknown key study.bas; did you mean base"),
    ],
)
def test_a_call_that_cannot_be_meant_is_told_in_one_line(given: dict[str, object], told: str) -> None:
    whole = {"methods": ["diloco"], "task": Line, **SMALL} | given
    with pytest.raises(ConfigError, match=told) as caught:
        lab.study(whole.pop("methods"), **whole)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        (f"{HERE}:Line", f"{HERE}:Lines", "does not load"),
        (f"{HERE}:Line", "nowhere:Line", "does not load"),
        (f"{HERE}:Line", f"{HERE}:Halfway", "has no model; it needs model"),
        (f"{HERE}:Halfway", f"{HERE}:Line", "is no outer method"),
    ],
)
def test_what_cannot_be_brought_is_told_in_one_line(was: str, now: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        parse_study(FILE.replace(was, now), "mine.toml")
    assert str(caught.value).startswith("mine.toml: ")
    assert "\n" not in str(caught.value)
