from __future__ import annotations

from decentral.observe.health import LASTS, Notices, health_sentence
from decentral.observe.status import Status

ME, A, B = "12D3KooWmyselfmyself", "12D3KooWaaaaaaaaaAAA", "12D3KooWbbbbbbbbbBBB"
OUTLIER = {"round": 7, "peer": A, "norm": 31.0, "median": 1.0, "times": 31.0}
TWINS = {"round": 9, "peers": [A, ME], "cosine": 0.99}


def test_an_outlier_is_told_by_its_name_its_size_and_the_way_out():
    sentence = Notices().hear("outlier", OUTLIER, ME)
    assert sentence is not None
    assert "the update of …aaaAAA is 31 times as large as the others' (round 7)" in sentence
    assert 'norm_clip = "median"' in sentence


def test_a_peer_that_is_the_outlier_itself_is_told_to_look_at_its_own_settings():
    sentence = Notices().hear("outlier", {**OUTLIER, "peer": ME}, ME)
    assert sentence is not None
    assert sentence.startswith("your update is 31 times as large")


def test_twins_are_told_with_the_cause():
    assert Notices().hear("twins", TWINS, ME) == (
        "you and …aaaAAA send nearly the same update: do both use the same seed and data? see peer.seed, peer.shard"
    )


def test_the_newest_notice_is_the_health_of_a_peer_that_trains_and_ends_after_a_while():
    notices = Notices()
    notices.hear("outlier", OUTLIER, ME)
    notices.hear("twins", TWINS, ME)
    assert notices.hear("commit", {"round": 9}, ME) is None
    assert [sentence[:3] for sentence in notices.now(10)] == ["you", "the"]
    status = Status(state="training", round=10, rounds_seen=4, rounds_contributed=4, notices=notices.now(10))
    assert health_sentence(status).startswith("attention: you and …aaaAAA send nearly the same update")
    assert health_sentence(status).endswith("0.0 kB sent per round")
    assert notices.now(7 + LASTS) == notices.now(8 + LASTS)[:1]
    assert notices.now(9 + LASTS) == ()
