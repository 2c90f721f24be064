"""A run that is over, round by round. The golden folder is of a real demo: four peers, one killed, a newcomer."""

from __future__ import annotations

from pathlib import Path

import pytest

from decentral.dashboard.live import Replay
from decentral.errors import UsageError
from tests.dashboard.conftest import Serve
from tests.dashboard.site import GOLDEN, Folder, looked


def test_the_last_round_of_a_replay_is_what_the_page_showed_at_the_end() -> None:
    live, replay = looked(GOLDEN), Replay(GOLDEN)
    end = replay.at()
    assert end["rounds"] == live["rounds"]
    assert end["learning"] == live["learning"]
    assert end["now"]["run"]["round"] == live["now"]["run"]["round"] == replay.span[1]


def test_at_each_round_only_what_had_happened_by_then_is_shown() -> None:
    replay = Replay(GOLDEN)
    first, last = replay.span
    sent = []
    for round_ in range(first, last + 1):
        parts = replay.at(round_)
        assert parts["rounds"]["rounds"][-1]["step"] == round_
        assert parts["now"]["health"].startswith(f"replay: round {round_} of ")
        assert all(told <= round_ for told in parts["learning"]["held_out"]["round"])
        sent.append(parts["now"]["bytes"]["sent"])
    assert sent == sorted(sent)
    assert sent[0] < sent[-1]


def test_the_golden_run_lost_a_peer_and_shows_it() -> None:
    rounds = Replay(GOLDEN).at()["rounds"]["rounds"]
    sizes = [len(made["contributors"]) + len(made["late"]) for made in rounds]
    assert max(sizes) == 4
    assert any(made["late"] for made in rounds)
    assert all(sum(made["split"].values()) == pytest.approx(made["seconds"], abs=0.01) for made in rounds)
    assert all(made["votes"] >= 2 for made in rounds)


def test_a_round_that_is_not_there_is_the_nearest_that_is() -> None:
    replay = Replay(GOLDEN)
    assert replay.at(10**9)["now"] == replay.at(replay.span[1])["now"]
    assert replay.at(0)["now"] == replay.at(replay.span[0])["now"]


def test_a_folder_without_a_round_says_so(folder: Folder) -> None:
    with pytest.raises(UsageError, match="tell of no round"):
        Replay(folder.path)


def test_the_page_of_a_replay_has_a_slider_and_no_stream(serve: Serve) -> None:
    site = serve(GOLDEN, replay=True)
    first, last = site.view()["page"]["replay"]
    assert site.view(round=first + 1)["now"]["run"]["round"] == first + 1
    assert last > first + 1
    assert site.view(round="x")["now"]["run"]["round"] == last
    assert site.ask("/api/stream").status == 404


def test_a_folder_that_cannot_be_replayed_is_told_on_the_page(folder: Folder, serve: Serve) -> None:
    assert "no round" in serve(folder.path, replay=True).view()["now"]["health"]


def test_a_replay_without_a_peer_says_so(tmp_path: Path, serve: Serve) -> None:
    assert serve(tmp_path, replay=True).view()["now"]["word"] == "nothing"


def test_what_no_file_kept_is_not_known_in_a_replay() -> None:
    now = Replay(GOLDEN).at()["now"]
    assert now["me"]["sent_per_second"] is None
    assert now["me"]["max_upload"] is None
    assert {peer["path"] for peer in now["peers"]} == {None}
    assert {peer["presence"] for peer in now["peers"]} == {"member"}
    assert now["bytes"]["kinds"] == []
    assert now["bytes"]["dense"] > now["bytes"]["sent"]
