"""What a peer's status tells a tracker of experiments: numbers under ``swarm/``, the same wherever they are logged."""

from __future__ import annotations

from decentral.observe.status import Status

PREFIX = "swarm/"


def swarm_numbers(status: Status) -> dict[str, float]:
    """Those of one moment; what is not known yet is not there.

    Bytes are counted since the process began, in both directions over everything; ``contributed`` is the share of the
    last 100 rounds that carry this peer's update; the figures of docs/diagnostics.md are of the newest round.
    """
    numbers: dict[str, float] = {
        "round": status.round,
        "inner_steps": status.inner_steps,
        "members": len(status.members),
        "bytes_sent": status.bytes_sent,
        "bytes_received": status.bytes_received,
        "bytes_per_round": status.bytes_per_round,
        **status.diagnostics,
    }
    if status.rounds_seen:
        numbers["contributed"] = status.rounds_contributed / status.rounds_seen
    if status.usual_round_seconds is not None:
        numbers["round_seconds"] = status.usual_round_seconds
    for name in ("held_seconds", "checkpoint_held_seconds"):
        if (seconds := getattr(status, name)) is not None:
            numbers[name] = seconds
    return {f"{PREFIX}{name}": float(value) for name, value in numbers.items()}
