"""What a study may say: each mistake is one line that names it, with a manifest's exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from decentral.errors import ConfigError, UsageError
from decentral.lab.call import usual_workers
from decentral.lab.plan import Plan
from decentral.lab.terms import check_device, check_installed, load_study, parse_study
from tests.lab.declared import TEXT

ROOT = Path(__file__).parents[2]
SHIPPED = [ROOT / "decentral/lab/example.toml", *sorted(ROOT.glob("experiments/methods/*.toml"))]

MISTAKES = [
    ('task = "digits"', 'task = "chess"', "study.task: 'chess' is no task; known: language"),
    ("rounds = 4", "round = 4", "unknown key study.round; did you mean rounds?"),
    ("rounds = 4", "", "rounds and tokens both say how long"),
    ("rounds = 4", "rounds = 4\ntokens = 100", "rounds and tokens both say how long"),
    ("rounds = 4", "tokens = 1", "study.tokens = 1 is less than one inner step sees"),
    ("learning_rates = [0.003, 0.03]", "learning_rates = []", "study.learning_rates"),
    ("seeds = [1, 2, 3]", "seeds = [1, 101]", "seed 101 is searched and reported"),
    ("seeds = [1, 2, 3]", "seeds = [1, 1]", "seeds has one twice"),
    ("points = 2", 'points = 2\nbase = "adamw"', "study.base = adamw: no method or reference"),
    ("points = 2", "points = 2\nmargin = 5", "study.margin = 5"),
    ('preset = "diloco"', 'preset = "dilco"', "diloco: preset 'dilco' does not exist; did you mean diloco?"),
    (
        'preset = "diloco"',
        'preset = "diloco"\nouter = { moment = 1 }',
        "diloco: unknown key outer.moment; did you mean momentum?",
    ),
    ('preset = "diloco"', 'preset = "diloco"\ninner = { steps = 5 }', "inner.steps = 5 does not divide the 24"),
    (
        'preset = "diloco"',
        'preset = "diloco"\nsearch = { "outer.momentum" = [0.1, 0.2, 0.3] }',
        "every method may try 2",
    ),
    ('preset = "diloco"', 'preset = "diloco"\nsearch = { momentum = [0.1] }', "is no TABLE.KEY"),
    ('name = "data-parallel"', 'name = "diloco"', "diloco is there twice"),
    ('of = "diloco"', 'of = "data-parallel"', "no method has that name"),
    ('kind = "data-parallel"', 'kind = "data parallel"', "reference.0.kind = 'data parallel'"),
    ('kind = "data-parallel"', 'kind = "alone"\ninner = { optimizer = "spsa" }', "data-parallel: "),
    (
        'preset = "diloco"\n\n[[reference]]',
        'preset = "local_sgd"\n\n[[control]]\nname = "m"\nof = "diloco"\nflips = "momentum"\n\n[[reference]]',
        'm: flips = "momentum" does not fit local_sgd, which has no state',
    ),
    ("[inner]", "[grid]\npeers = [0]\n[inner]", "grid.peers: 0 is no number of peers"),
    ("[inner]", '[grid]\n"inner.stepps" = [6]\n[inner]', "unknown key inner.stepps"),
    ("rate_mbit = 20", "rate_mbit = 0", "link.0.rate_mbit = 0"),
    ("[inner]", '[[compare]]\na = "diloco"\nb = "muon"\n[inner]', "compare muon: no method, reference or control"),
    ("[inner]", '[[compare]]\na = "diloco"\nb = "diloco"\n[inner]', "compare diloco: with itself"),
    ("hidden = 16", "hidden = 16\nwidth = 3", "unknown key model.width"),
    ("[inner]", '[data]\ncorpus = "wiki"\n[inner]', 'data.corpus = "wiki": a study trains on its task\'s own data'),
    ("[model]", "[model", "not TOML"),
]


@pytest.mark.parametrize(("was", "now", "told"), MISTAKES, ids=[told[:50] for _, _, told in MISTAKES])
def test_a_mistake_is_told_in_one_line(was: str, now: str, told: str) -> None:
    assert was in TEXT
    with pytest.raises(ConfigError) as caught:
        parse_study(TEXT.replace(was, now), "mine.toml")
    assert told in str(caught.value)
    assert str(caught.value).startswith("mine.toml: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 10


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_the_studies_that_are_shipped_can_be_run(path: Path) -> None:
    assert Plan(load_study(path)).size() >= 1


@pytest.mark.parametrize(("module", "package"), [("scipy", "scipy"), ("sklearn", "scikit-learn")])
def test_a_study_without_what_it_needs_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it was not installed
    with pytest.raises(ConfigError, match=rf"a study needs {package}; pip install .*scikit-learn>=1.5.*scipy"):
        check_installed(parse_study(TEXT))


@pytest.mark.parametrize(
    ("task", "device"), [("language", "gpu"), ("language", "meta"), ("language", "hpu"), ("digits", "cuda")]
)
def test_a_device_that_a_study_cannot_train_on_is_told_in_one_line(task: str, device: str) -> None:
    study = parse_study(TEXT.replace('task = "digits"', f'task = "{task}"'))
    check_device(study, "cpu")
    with pytest.raises(UsageError, match=f"^--device {device}: .*; leave it out$"):
        check_device(study, device)


def test_models_on_a_card_have_one_process_unless_more_are_asked_for() -> None:
    assert usual_workers("cuda") == usual_workers("cuda:1") == 1 <= usual_workers("cpu")
