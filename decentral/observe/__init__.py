"""A peer as it shows itself: events and metrics on disk, a status to ask for, one sentence of health.

The peer reports, this folder writes it down and says it in words. Nothing here talks to the swarm, and nothing but
``contributions``, which looks at the rounds themselves, loads torch.
"""

from decentral.observe.events import EventLog, read_events
from decentral.observe.health import health_sentence
from decentral.observe.metrics import MetricsLog, read_metrics
from decentral.observe.requests import ask, take_requests
from decentral.observe.status import Status, read_status, write_status

__all__ = [
    "EventLog",
    "MetricsLog",
    "Status",
    "ask",
    "health_sentence",
    "read_events",
    "read_metrics",
    "read_status",
    "take_requests",
    "write_status",
]
