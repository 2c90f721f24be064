"""What a peer's status tells Prometheus. The names are public: dashboards are built on them."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from decentral.observe.diagnostics import BANDS
from decentral.observe.metrics import exposition
from decentral.observe.status import STATES, Status
from decentral.replica.figures import NAMES

_OURS = "decentral_peer"
_MEANING = {
    "norm_dispersion": "Standard deviation of the contributions' norms over their mean.",
    "loss_dispersion": "Standard deviation of the peers' losses over their mean.",
    "mean_cosine": "Mean cosine over all pairs of contributions.",
    "debt_ratio": "Norm of what this peer owes over that of its newest pseudo-gradient.",
    "never_sent": "Share of parameters that nobody has sent since this process began.",
    "replica_distance": "Distance to the last partner's replica over the length of ours.",
    "replica_variance": "Half the mean square of that distance over the last pairs.",
}


def text(status: Status, *, alive: bool) -> str:
    """In Prometheus' text format; ``alive``: whether the process of the status runs."""
    return exposition(lambda: numbers(status, alive=alive)).decode()


def numbers(status: Status, *, alive: bool) -> Iterator[Metric]:
    """Those of one status; what it does not know is not there."""
    yield _gauge("up", "Whether the peer's process runs.", float(alive))
    yield _gauge("updated_seconds", "When the status was written, since the epoch.", status.updated)
    yield _gauge("round", "Outer steps made.", status.round)
    yield _gauge("members", "Members of the epoch.", len(status.members))
    yield _gauge("inner_steps", "Inner steps of this peer, over all its lives.", status.inner_steps)
    yield _state(status)
    yield _gauge("live_members", "Members that are here, this one included.", sum(map(_is_live, status.members)))
    yield _gauge("rounds_seen", "Rounds that ended since this peer is a member, at most 100.", status.rounds_seen)
    yield _gauge("rounds_contributed", "Those of them that carry this peer's update.", status.rounds_contributed)
    yield _gauge("stalled_seconds", "Without a round, where that is unusual; 0: as usual.", status.stalled_seconds)
    yield _gauge("send_rate_bytes", "Bytes sent per second, of late.", status.sent_per_second)
    yield _gauge("receive_rate_bytes", "Bytes received per second, of late.", status.received_per_second)
    yield _counter("sent_bytes", "Bytes sent since the process began.", status.bytes_sent)
    yield _counter("received_bytes", "Bytes received since the process began.", status.bytes_received)
    held = "Seconds of a round in which the training thread copies parameters."
    taking = "Seconds in which it copies what a checkpoint holds."
    known = (
        ("loss", "Nats per token.", status.loss),
        ("held_out_loss", "Nats per token.", status.held_out_loss),
        ("held_seconds", held, status.held_seconds),
        ("checkpoint_held_seconds", taking, status.checkpoint_held_seconds),
    )
    for name, meaning, value in known:
        if value is not None:
            yield _gauge(name, meaning, value)
    yield from _diagnostics(status)


def _state(status: Status) -> Metric:
    states = GaugeMetricFamily(f"{_OURS}_state", "1 for the state that it is in.", labels=["state"])
    for state in STATES:
        states.add_metric([state], float(state == status.state))
    return states


def _is_live(member: Mapping[str, Any]) -> bool:
    return bool(member.get("live", True))


def _diagnostics(status: Status) -> Iterator[Metric]:
    known = [name for name in NAMES if name in status.diagnostics]
    for name in known:
        yield _gauge(name, _MEANING[name], status.diagnostics[name])
    if known:
        yield _gauge(
            "diagnosed_round", "Outer steps made with the round that the figures are of.", status.diagnosed_round
        )
        out = GaugeMetricFamily(f"{_OURS}_out_of_band", "Whether a figure is out of its band.", labels=["figure"])
        for band in BANDS:
            if band.figure in status.diagnostics:
                out.add_metric([band.figure], float(band.figure in status.out_of_band))
        yield out


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_OURS}_{name}", meaning, value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    """Prometheus knows it by this name and ``_total``."""
    return CounterMetricFamily(f"{_OURS}_{name}", meaning, value)
