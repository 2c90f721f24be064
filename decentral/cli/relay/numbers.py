"""What a relay tells Prometheus. The names are public: dashboards are built on them."""

from collections.abc import Iterator

import psutil
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from decentral.transport.relay.service import Relay

_OURS = "decentral_relay"


def numbers(relay: Relay) -> Iterator[Metric]:
    """Those of this moment."""
    limits, counts = relay.limits, relay.counts
    yield _gauge("peers", "Peers with a connection.", relay.peers)
    yield _gauge("places", "Peers that can be reached through here.", relay.places)
    yield _gauge("places_limit", "Places there are.", limits.places)
    yield _gauge("connections", "Connections relayed now.", relay.connections)
    yield _gauge("connections_limit", "Connections relayed at most.", limits.connections)
    yield _counter("bytes", "Bytes passed on, both directions.", counts.nbytes)
    yield _counter("joined", "Connections relayed since the start.", counts.joined)
    yield _counter("granted", "Places given and renewed since the start.", counts.granted)
    refused = CounterMetricFamily(f"{_OURS}_refused", "Questions refused, by answer.", labels=["status"])
    for status, count in sorted(counts.refused.items()):
        refused.add_metric([status.name.lower()], count)
    yield refused
    memory = psutil.Process().memory_info().rss
    yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory of the process.", memory)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_OURS}_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    """Prometheus knows it by this name and ``_total``."""
    return CounterMetricFamily(f"{_OURS}_{name}", text, value)
