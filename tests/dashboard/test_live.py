"""A folder that grows while it is looked at."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from decentral.dashboard.live import PeerRates, Replay
from decentral.errors import UsageError
from decentral.observe.status import ProcessInfo, Status, write_status
from tests.dashboard.conftest import Live, Serve
from tests.kit.site import GOLDEN, ME, OTHER, THIRD, Folder, looked


def test_what_comes_is_shown_and_what_was_there_is_read_once(
    folder: Folder, live_folder: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes read of the growing files, over a hundred looks, are their bytes."""
    from decentral.observe.events import FileTail

    read, whole = [0], FileTail._read

    def counted(tail: FileTail) -> list[bytes]:
        before = tail._file.tell() if tail._file is not None else 0
        lines = whole(tail)
        read[0] += (tail._file.tell() - before) if tail._file is not None else 0
        return lines

    monkeypatch.setattr(FileTail, "_read", counted)
    live = live_folder(folder.path)
    for made in range(100):
        folder.round(ME, OTHER)
        parts = live.look()
        assert parts["rounds"]["rounds"][-1]["step"] == made + 1
    nbytes = sum((folder.path / name).stat().st_size for name in ("events.jsonl", "metrics.jsonl"))
    assert read[0] == nbytes


def test_a_part_that_did_not_change_is_the_same_object(folder: Folder, live_folder: Live) -> None:
    live = live_folder(folder.path)
    folder.round(ME)
    first, second = live.look(), live.look()
    assert first["rounds"] is second["rounds"]
    assert first["learning"] is second["learning"]
    folder.round(ME)
    assert live.look()["rounds"] is not second["rounds"]


def test_a_file_that_is_put_aside_loses_no_round(folder: Folder, live_folder: Live) -> None:
    live = live_folder(folder.path)
    folder.round(ME)
    live.look()
    folder.round(ME)
    folder.events.close()
    os.rename(folder.path / "events.jsonl", folder.path / "events.1.jsonl")
    other = Folder(folder.path, made=folder.made)
    other.round(ME)
    steps = [made["step"] for made in (live.look(), live.look())[1]["rounds"]["rounds"]]
    assert steps == [1, 2, 3]
    other.events.close()
    other.metrics.close()


def test_a_peer_that_was_killed_is_gone(folder: Folder) -> None:
    write_status(folder.path, Status(state="training", health="healthy: round 3"), ProcessInfo(pid=1, created=0.0))
    now = looked(folder.path)["now"]
    assert (now["word"], now["alive"]) == ("gone", False)


def test_a_folder_whose_status_is_damaged_says_so(folder: Folder) -> None:
    (folder.path / "status.json").write_text("{", encoding="utf-8")
    assert looked(folder.path)["now"]["word"] == "nothing"


def test_rates_with_each_peer_follow_from_two_statuses() -> None:
    rates = PeerRates()
    members = [({"peer": OTHER, "bytes_sent": sent, "bytes_received": 0},) for sent in (0, 500)]
    assert rates.see(Status(members=members[0], updated=10.0)) == {}
    told = rates.see(Status(members=members[1], updated=15.0))
    assert told == {OTHER: {"sent_per_second": 100.0, "received_per_second": 0.0}}
    assert rates.see(Status(members=members[1], updated=15.0)) == told, "the same status, read again"


def test_a_peer_without_members_or_with_strange_ones_is_shown(folder: Folder) -> None:
    strange: tuple[dict[str, Any], ...] = ({}, {"peer": 7}, {"peer": "<script>", "bytes_sent": None})
    folder.write(members=strange)
    now = looked(folder.path)["now"]
    assert [peer["peer"] for peer in now["peers"]] == ["?", "7", "<script>"]


def test_stages_are_shown_with_names_and_what_each_waits_for(folder: Folder) -> None:
    stages = ({"peer": OTHER, "waits_for": None}, {"peer": ME, "self": True, "waits_for": 0})
    stages = ({"peer": OTHER, "waits_for": None}, {"peer": ME, "self": True, "waits_for": 0})
    folder.write(names={OTHER: "ada"}, stages=stages)
    shown = looked(folder.path)["now"]["stages"]
    assert [(stage["short"], stage["waits_for"]) for stage in shown] == [("ada (bbbbbb)", None), ("…aaaaaa", 0)]


def test_the_invite_is_nowhere(folder: Folder) -> None:
    folder.write(invite="decentral1:secret")
    folder.events("joined", invite="decentral1:secret", round=0, resumed=False)
    assert "secret" not in str(looked(folder.path))
    assert "secret" in str(asdict(folder.status))


def test_an_open_round_is_shown_until_the_run_is_over(folder: Folder) -> None:
    begun = {"round": 4, "members": 3, "offers": 2, "leader": OTHER, "ballot": 1, "votes": None, "seconds": 1.5}
    folder.write(open_round=begun)
    shown = looked(folder.path)["now"]["open"]
    assert shown == {**begun, "leader": "…" + OTHER[-6:]}
    folder.write(state="done")
    assert looked(folder.path)["now"]["open"] is None


def test_bytes_by_kind_are_all_bytes(folder: Folder) -> None:
    kinds = {"frame": [700, 600], "fetch": [100, 0], "control": [50, 50], "speed": [30, 0]}
    folder.write(kinds=kinds, bytes_sent=900, bytes_measuring=30, bytes_received=700)
    shown = looked(folder.path)["now"]["bytes"]["kinds"]
    assert [(kind["name"], kind["sent"], kind["received"]) for kind in shown] == [
        ("updates", 800, 600),
        ("offers and votes", 50, 50),
        ("discovery, and the rest", 50, 50),
        ("measuring lines", 30, 0),
    ]


def test_a_dense_all_reduce_is_what_the_ring_of_all_members_would_have_sent(folder: Folder) -> None:
    folder.write(num_parameters=1000, inner_steps=10, members=({"peer": ME}, {"peer": OTHER}))
    assert looked(folder.path)["now"]["bytes"]["dense"] == 10 * 4 * 1000
    folder.write(num_parameters=0)
    assert looked(folder.path)["now"]["bytes"]["dense"] is None


def test_in_gossip_the_partner_and_this_peer_met_and_of_others_nothing_is_known(folder: Folder) -> None:
    folder.write(members=tuple({"peer": name, "self": name == ME} for name in (ME, OTHER, THIRD)))
    folder.events("pair", step=0, partner=OTHER, disagreement=0.1)
    now = looked(folder.path)["now"]
    assert now["gossips"] is True
    assert [peer["in_last_round"] for peer in now["peers"]] == [True, True, None]


def test_a_second_run_in_the_folder_begins_anew(folder: Folder, live_folder: Live) -> None:
    """After a second demo in the same place the page showed rounds of both."""
    live = live_folder(folder.path)
    folder.write(run_id="aa")
    folder.round(ME)
    folder.round(ME)
    live.look()
    for name in ("events.jsonl", "metrics.jsonl"):
        (folder.path / name).unlink()
    second = Folder(folder.path)
    second.write(run_id="bb", peer=OTHER)
    second.round(OTHER)
    parts = live.look()
    assert [made["step"] for made in parts["rounds"]["rounds"]] == [1]
    assert parts["rounds"]["names"] == ["…" + name[-6:] for name in (OTHER, ME)]
    second.events.close()
    second.metrics.close()


def test_of_a_thousand_members_those_that_a_person_looks_for_are_shown(folder: Folder) -> None:
    gone = {"peer": "gone", "live": False}
    others = [{"peer": f"peer {number}", "live": True} for number in range(998)]
    folder.write(members=(*others, gone, {"peer": ME, "self": True}))
    now = looked(folder.path)["now"]
    assert [peer["peer"] for peer in now["peers"][:2]] == [ME, "gone"]
    assert len(now["peers"]) + now["more_peers"] == 1000


# ---- test replay ----
#
# A run that is over, round by round. The golden folder is of a real demo: four peers, one killed, a newcomer.


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


@pytest.mark.parametrize("sample", [None, [], {"text": "no more"}, "text"])
def test_what_the_model_says_is_shown_as_one_line_and_what_is_no_such_thing_not(folder: Folder, sample: Any) -> None:
    folder.write(sample={"prompt": "The", "text": "The\x1b[2J\u202e" + 9999 * "x", "round": 3})
    shown = looked(folder.path)["now"]["sample"]
    assert (shown["prompt"], shown["round"], shown["text"][:10]) == ("The", "3", "The?[2J?xx")
    assert len(shown["text"]) == 300
    folder.write(sample=sample)
    assert looked(folder.path)["now"]["sample"] == {}


def test_a_name_is_on_the_page_wherever_its_peer_is_and_one_that_is_none_nowhere(
    folder: Folder, live_folder: Live
) -> None:
    live, letters = live_folder(folder.path), OTHER[-6:]
    members = tuple({"peer": name, "self": name == ME, "live": True} for name in (ME, OTHER, THIRD))
    folder.round(ME, OTHER, members=(ME, OTHER, THIRD), leader=OTHER)
    folder.events("synced", peer=OTHER, round=1)
    opened = {"round": 2, "leader": OTHER}
    beside = {"notices": (f"…{letters} sends much",), "stalled_by": f"waiting for …{letters}"}
    folder.write(members=members, waiting_for=(OTHER,), open_round=opened, **beside)
    assert "Anna" not in str(live.look())
    folder.write(names={OTHER: "Anna", THIRD: "<script>" + 10_000 * "x"})
    parts, named = live.look(), f"Anna ({letters})"
    now = parts["now"]
    assert now["peers"][1]["short"] == now["open"]["leader"] == named
    assert (now["me"]["waiting_for"], now["me"]["notices"]) == ([named], [f"{named} sends much"])
    assert now["me"]["stalled_by"] == f"waiting for {named}"
    assert named in parts["rounds"]["names"]
    assert parts["events"]["events"][0]["text"] == f"the model came from {named}"
    assert "script" not in str(parts)
