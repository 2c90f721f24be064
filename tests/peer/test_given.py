"""A peer's totals go on over restarts, and it is thanked for them."""

from pathlib import Path

import pytest

from decentral.peer.given import Given, Giving, share_given, thanks
from decentral.training.reporting import Counters
from tests.kit.problems import Problem, alone, run_terms, train


def test_totals_count_rounds_steps_and_the_time_in_which_nobody_paused():
    counters, times = Counters(), iter([1.0, 2.0, 3.0, 50.0, 51.0, 52.0])
    giving = Giving(counters, 64, lambda: 1000, clock=lambda: next(times))
    giving.before = Given(rounds=3, tokens=640, seconds=100.0, sent=5)
    for _ in range(3):
        giving.stepped(paused=False)
    giving.pauses()
    for _ in range(2):
        giving.stepped(paused=False)
    giving.stepped(paused=True)
    counters.count_round(True, 1)
    counters.count_round(True, 2)
    counters.count_round(False, 3)
    assert giving.now() == Given(rounds=5, tokens=640 + 6 * 64, seconds=103.0, sent=1005)
    counters.branch_left(1)  # what it gave after that is in no round of the run
    assert giving.now().rounds == 4
    assert Given.from_mapping(giving.memory()) == giving.now()
    assert Given.from_mapping(None) == Given()


@pytest.mark.parametrize(
    ("given", "steps", "share", "said"),
    [
        (
            Given(rounds=41, seconds=3.2 * 3600),
            12300,
            0.12,
            "you gave 41 rounds, 12,300 steps and 3.2 h: 12 % of the run so far. Thank you.",
        ),
        (Given(rounds=1, seconds=30), 1, None, "you gave 1 round, 1 step and 30 s. Thank you."),
    ],
)
def test_who_lent_a_machine_is_thanked(given: Given, steps: int, share: float | None, said: str):
    assert thanks(given, steps, share) == said


def test_the_share_is_of_what_the_chain_counts():
    assert share_given(3, 12) == 0.25
    assert share_given(3, 0) is None  # gossip


def test_a_second_life_goes_on_with_the_totals_of_the_first(tmp_path: Path):
    terms = run_terms("sparseloco")
    with alone(tmp_path, terms, problem := Problem(0), tokens_per_step=7) as peer:
        train(peer, problem, rounds=2)
    first = peer.status()
    with alone(tmp_path, terms, again := Problem(0), tokens_per_step=7) as peer:
        assert peer.status().given_rounds == first.given_rounds == 2
        train(peer, again, rounds=4)
    last = peer.status()
    assert (last.given_rounds, last.given_tokens, last.given_share) == (4, 7 * last.inner_steps, 1.0)
    assert last.given_seconds > first.given_seconds
    assert last.written_today >= first.written_today
