"""Which cells a study wants: the same search for all, then what it chose on other seeds."""

from __future__ import annotations

from decentral.lab.cells import Cell
from decentral.lab.plan import Chosen, Plan
from decentral.lab.running import Outcome, failure
from tests.lab.declared import TEXT, ended, plan

OWN = 'preset = "diloco"\nsearch = { "outer.momentum" = [0.0, 0.5] }'


def rate(cell: Cell) -> float:
    return cell.manifest.inner.learning_rate


def seed(cell: Cell) -> int:
    return cell.manifest.run.seed


def gone(of: Plan, losses: dict[float, float | None], own: dict[float, float] | None = None) -> dict[str, Outcome]:
    """All that a plan wants, one after the other; the loss is by the rate, less what is gained by the momentum."""
    known: dict[str, Outcome] = {}
    while wanted := of.due_cells(known):
        for cell in wanted:
            loss = losses[rate(cell)]
            gain = 0.0 if cell.kind != "swarm" or own is None else own.get(cell.manifest.outer.hyper["momentum"], 0.0)
            known[cell.id] = ended(None if loss is None else loss - gain)
    return known


def test_the_search_comes_first_and_every_method_has_the_same() -> None:
    first = plan().due_cells({})
    assert {(cell.kind, rate(cell), seed(cell)) for cell in first} == {
        (kind, lr, 101) for kind in ("swarm", "data-parallel") for lr in (0.003, 0.03)
    }


def test_what_was_chosen_is_reported_on_seeds_that_were_not_searched() -> None:
    mine = plan()
    known = gone(mine, {0.003: 1.0, 0.03: 2.0})
    for contestant in mine.contestants:
        cells = [one.cell for one in mine.report(contestant, mine.choose(contestant, known))]
        assert [(rate(cell), seed(cell)) for cell in cells] == [(0.003, 1), (0.003, 2), (0.003, 3)]
    assert len(known) == mine.size() == mine.done(known) == 4 + 9


def test_constants_of_its_own_are_tried_at_the_best_rate_only() -> None:
    mine = plan(TEXT.replace('preset = "diloco"', OWN))
    known = gone(mine, {0.003: 2.0, 0.03: 1.0}, own={0.5: 0.1})
    chosen = mine.choose(mine.contestants[0], known)
    assert chosen.place is not None
    assert (chosen.place.learning_rate, dict(chosen.place.own)) == (0.03, {"outer.momentum": 0.5})
    tried = [(place.learning_rate, place.own) for place, _, _ in mine.search_cells(mine.contestants[0], known)]
    assert tried == [(0.003, ()), (0.03, ()), (0.03, (("outer.momentum", 0.0),)), (0.03, (("outer.momentum", 0.5),))]


def test_a_control_has_the_settings_of_its_method_and_searches_nothing() -> None:
    mine = plan(TEXT.replace('preset = "diloco"', OWN))
    known = gone(mine, {0.003: 1.0, 0.03: 2.0}, own={0.5: 0.1})
    method, control = (one for one in mine.contestants if one.entry == "diloco")
    assert mine.choose(control, known) == mine.choose(method, known)
    assert mine.search_cells(control, known) == []
    flips = {one.cell.flips for one in mine.report(control, mine.choose(control, known))}
    assert flips == {"update"}


def test_a_rate_that_diverges_on_a_seed_is_not_chosen() -> None:
    mine = plan()
    known = gone(mine, {0.003: 3.0, 0.03: None})
    place = mine.choose(mine.contestants[0], known).place
    assert place is not None
    assert place.learning_rate == 0.003


def test_a_method_that_no_rate_suits_is_not_reported_and_the_others_are() -> None:
    mine = plan()
    known = {cell.id: failure("no memory") if cell.kind == "swarm" else ended(1.0) for cell in mine.due_cells({})}
    assert mine.choose(mine.contestants[0], known) == Chosen(over=True)
    assert {cell.kind for cell in mine.due_cells(known)} == {"data-parallel"}


def test_seeds_are_paired_over_methods_and_cells_know_no_names() -> None:
    mine, renamed = (
        plan(),
        plan(TEXT.replace('"diloco"\npreset', '"mine"\npreset').replace('of = "diloco"', 'of = "mine"')),
    )
    assert [cell.id for cell in mine.due_cells({})] == [cell.id for cell in renamed.due_cells({})]


def test_every_point_of_a_grid_searches_for_itself_and_shares_what_is_the_same() -> None:
    mine = plan(TEXT.replace("[inner]", '[grid]\npeers = [2, 3]\n"inner.steps" = [3, 6]\n[inner]'))
    cells = mine.due_cells({})
    of_methods = [cell for cell in cells if cell.kind == "swarm"]
    assert {(cell.peers, cell.manifest.inner.steps) for cell in of_methods} == {(2, 3), (2, 6), (3, 3), (3, 6)}
    assert {cell.steps for cell in cells} == {24}
    assert len(of_methods) == 4 * 2
    assert len(cells) - len(of_methods) == 2 * 2  # H is nothing to a reference


def test_a_link_is_part_of_a_cell_only_where_time_decides_what_is_merged() -> None:
    link = '[[link]]\nname = "slow"\nrate_mbit = 20\nslow = 3\n'
    for preset, of_links in (("diloco", [None]), ("eager", ["home", "slow"]), ("noloco", [None, "slow"])):
        text = TEXT.replace('preset = "diloco"', f'preset = "{preset}"').replace("[0.003, 0.03]", "[0.003]")
        mine = plan(text.replace("[[link]]", link + "\n[[link]]"))
        contestant = mine.contestants[0]
        links = [one.link for one in mine.report(contestant, mine.choose(contestant, {}))]
        assert sorted(set(links), key=str) == sorted(of_links, key=str)
