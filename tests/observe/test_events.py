from pathlib import Path

from decentral.observe.events import EventLog, event_line, read_events
from decentral.observe.metrics import MetricsLog, read_metrics


def clock(*times: float):
    return iter(times).__next__


def test_an_event_carries_its_version_both_clocks_and_its_fields(tmp_path: Path) -> None:
    log = EventLog(tmp_path, wall=clock(100.0), monotonic=clock(7.25))
    log("commit", round=3, digest=b"\xab")
    log.close()
    assert list(read_events(tmp_path)) == [
        {"v": 1, "t": 100.0, "mono": 7.25, "event": "commit", "round": 3, "digest": "ab"}
    ]


def test_fields_cannot_overwrite_the_stamps(tmp_path: Path) -> None:
    log = EventLog(tmp_path, wall=clock(1.0), monotonic=clock(2.0))
    log("odd", t="mine", v=99)
    log.close()
    (row,) = read_events(tmp_path)
    assert (row["t"], row["v"], row["t_"], row["v_"]) == (1.0, 1, "mine", 99)


def test_observed_mappings_are_named_by_their_event_or_kind(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.observe({"event": "offer", "round": 1})
    log.observe({"kind": "vote", "round": 1})
    log.observe({"round": 2})
    log.close()
    assert [row["event"] for row in read_events(tmp_path)] == ["offer", "vote", "event"]


def test_events_can_be_asked_for_by_name_and_by_number(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    for i in range(10):
        log("even" if i % 2 == 0 else "odd", i=i)
    log.close()
    assert [row["i"] for row in read_events(tmp_path, last=3)] == [7, 8, 9]
    assert [row["i"] for row in read_events(tmp_path, last=2, event="even")] == [6, 8]


def test_a_directory_without_events_has_none(tmp_path: Path) -> None:
    assert list(read_events(tmp_path)) == []


def test_a_line_for_people_is_short_and_has_no_stamps_twice() -> None:
    line = event_line({"v": 1, "t": 0.0, "mono": 1.0, "event": "commit", "round": 3, "loss": 1.23456789, "x": "y" * 99})
    assert "commit" in line
    assert "round=3 loss=1.235" in line
    assert "..." in line
    assert "mono" not in line


def test_metrics_tell_inner_from_outer_steps(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, monotonic=clock(10.0, 10.5, 11.0))
    log.inner(1, loss=5.5)
    log.outer(1, bits_per_byte=7.9, bytes_sent=120)
    log.close()
    assert list(read_metrics(tmp_path, "inner")) == [{"scope": "inner", "step": 1, "seconds": 0.5, "loss": 5.5}]
    (outer,) = read_metrics(tmp_path, "outer")
    assert (outer["step"], outer["bits_per_byte"], outer["bytes_sent"]) == (1, 7.9, 120)
