"""What a forecast by rounds is made of: who is away when, and when a leader waits no longer."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from decentral.consensus.timing import Deadline
from decentral.errors import ConfigError
from decentral.manifest import preset_manifest
from decentral.simulate.by_rounds.air import LeaderView, proposal_time
from decentral.simulate.by_rounds.forecast import is_by_rounds
from decentral.simulate.by_rounds.machine import NEVER, absences
from decentral.simulate.scenario import PROFILES, Scenario
from decentral.simulate.simulation import forecast, simulate
from decentral.simulate.trace import Entry
from tests.simulate.draws import toy_manifest

RUN = {"rounds": 100, "salt": "rules"}


def view(heard: list[float], usable: list[float], **given: object) -> LeaderView:
    whole = {"opened": 0.0, "allowed": np.full(len(heard), 5.0), "awaited": np.ones(len(heard), dtype=np.bool_)}
    whole |= {"missing": 0.0, "num_present": len(heard), "heard": np.array(heard), "usable": np.array(usable)}
    return LeaderView(**(whole | given))  # type: ignore[arg-type]


def used(deadline: Deadline) -> Deadline:
    """One that has seen rounds of ten seconds."""
    for _ in range(8):
        deadline.observe(10.0)
    return deadline


def test_a_leader_waits_for_all_that_are_there_and_no_longer() -> None:
    assert proposal_time(view([10.0, 10.1, 10.2], [10.5, 10.4, 11.0]), used(Deadline(2.0, 60.0))) == 11.0


def test_who_is_late_is_waited_for_until_the_deadline_which_was_learnt() -> None:
    found = proposal_time(view([10.0, 10.1, 40.0], [10.0, 10.1, 40.0]), used(Deadline(2.0, 60.0)))
    assert 12.0 <= found <= 12.5


def test_without_a_history_it_is_the_ceiling() -> None:
    found = proposal_time(view([10.0, 10.1, 90.0], [10.0, 10.1, 90.0]), Deadline(2.0, 30.0))
    assert 40.0 <= found <= 40.5


def test_a_frame_that_is_on_its_way_is_waited_for_as_long_as_it_may_take() -> None:
    assert proposal_time(view([10.0, 10.1, 10.2], [10.0, 10.1, 18.0]), used(Deadline(2.0, 60.0))) == 18.0
    assert proposal_time(view([10.0, 10.1, 10.2], [10.0, 10.1, 30.0]), used(Deadline(2.0, 60.0))) == pytest.approx(20.2)


def test_a_newcomer_is_not_waited_for_and_who_went_without_a_word_is_until_it_is_missed() -> None:
    newcomer = np.array([True, True, False])
    assert (
        proposal_time(view([10.0, 10.1, 14.0], [10.0, 10.1, 14.0], awaited=newcomer), used(Deadline(2.0, 60.0))) == 10.1
    )
    assert proposal_time(view([10.0, 10.1], [10.0, 10.1], missing=11.0), used(Deadline(2.0, 60.0))) == 11.0
    assert proposal_time(view([10.0, 10.1], [10.0, 10.1], missing=math.inf), used(Deadline(2.0, 60.0))) < 13.0


def test_machines_go_away_when_those_do_on_which_every_message_is_simulated() -> None:
    profile = replace(PROFILES["spot"], crashes=0.4, speed_spread=0.1)
    scenario = Scenario(toy_manifest("gather", 5), profile, 5, hosts=3, rounds=12)
    trace = simulate(scenario).trace
    began = next(entry.time for entry in trace.of("logged"))
    for number in range(scenario.hosts):
        drawn = next(absences(profile, 5, number, scenario.round_seconds, began))
        assert first_end(trace, number) == pytest.approx(drawn.begin, abs=1.0)


def first_end(trace: object, number: int) -> float:
    ends = (entry for entry in trace if isinstance(entry, Entry) and entry.event in ("crashed", "left"))  # type: ignore[attr-defined]
    return next(entry.time for entry in ends if entry.host == number)


def test_machines_that_never_fail_are_never_away() -> None:
    assert list(islice(absences(PROFILES["even"], 0, 1, 30.0, 0.0), 1)) == [NEVER]


def test_one_seed_is_one_forecast_and_another_is_another() -> None:
    given = {"peers": 9, "profile": "home", "rounds": 12, "step_seconds": 1.0, "parameters": 1_000_000}
    manifest = preset_manifest("sparseloco", run=RUN)
    one, again, other = (forecast(manifest, seed=seed, by="rounds", **given) for seed in (3, 3, 4))  # type: ignore[arg-type]
    assert one == again
    assert one != other


@pytest.mark.parametrize(("preset", "profile"), [("sparseloco", "home"), ("diloco", "spot"), ("noloco", "lab")])
def test_hundreds_of_peers_make_all_their_rounds(preset: str, profile: str) -> None:
    heard: list[float] = []
    given = {"peers": 256, "profile": profile, "seed": 0, "step_seconds": 1.0, "parameters": 1_000_000}
    told = forecast(preset_manifest(preset, run=RUN), by="rounds", rounds=10, on_progress=heard.append, **given)  # type: ignore[arg-type]
    assert told["rounds"] == 10
    assert 0.0 < told["utilisation"] < 1.0
    assert told["seconds"] >= 9 * told["seconds_per_round"] * 0.5
    assert heard == sorted(heard)
    assert heard[-1] == 1.0


@pytest.mark.parametrize("peers", [3, 16])
def test_rounds_whose_frames_take_longer_than_their_owners_stay_end_with_fewer_and_no_nonsense(peers: int) -> None:
    """All that was offered never came: an infinite round, and then an error."""
    given = {"peers": peers, "profile": "spot", "seed": 1, "step_seconds": 1.0, "parameters": 1_000_000_000}
    told = forecast(preset_manifest("sparseloco", run=RUN), by="rounds", rounds=8, link=125_000.0, **given)  # type: ignore[arg-type]
    assert told["rounds"] < told["asked"] == 8
    figures = [value for value in told.values() if isinstance(value, float)]
    assert all(math.isfinite(value) and value >= 0.0 for value in figures)


@pytest.mark.parametrize(
    ("preset", "profile", "pace"),
    [
        ("sparseloco", "storm", "equal"),
        ("diloco", "home", "equal"),
        ("noloco", "spot", "equal"),
        ("sparseloco", "lab", "speed"),
    ],
)
def test_what_was_not_held_against_messages_is_not_reckoned(preset: str, profile: str, pace: str) -> None:
    manifest = preset_manifest(preset, run=RUN, inner={"pace": pace})
    assert not is_by_rounds(manifest, profile)
    given = {"peers": 4, "profile": profile, "seed": 0, "rounds": 2, "step_seconds": 1.0, "parameters": 1_000_000}
    with pytest.raises(ConfigError, match="use --by messages"):
        forecast(manifest, by="rounds", **given)  # type: ignore[arg-type]
