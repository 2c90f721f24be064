"""What a training job leaves behind: a row per round in ``metrics.jsonl``, and ``summary.json`` at its end."""

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from decentral.cli.job.training_context import TrainingContext
from decentral.observe.report import write_summary
from decentral.observe.status import Status
from decentral.parameters import gather, schema_of

HELD = ("held_seconds", "checkpoint_held_seconds")  # of the training thread, by a round and by a checkpoint

if TYPE_CHECKING:
    from decentral.peer import Peer


def record_round(
    context: TrainingContext, anchor: list[Tensor], progress: dict[str, object], *, evaluate: bool = False
) -> float | None:
    """One row of the state after a round; its bits per byte when that was asked for or takes little of the time."""
    bits = None
    if evaluate or context.judge.affordable(context.watch.seconds):
        bits = context.judge.bits_per_byte(anchor)
        context.held_out_loss = bits * math.log(2)
    tokens = context.num_steps * context.tokens_per_step
    quality = {} if bits is None else {"bits_per_byte": bits}
    context.metrics.outer(context.num_steps, tokens=tokens, **quality, **progress)
    return bits


def progress_of(peer: "Peer") -> dict[str, object]:
    """Where a peer of a swarm is, and what it cost so far."""
    return of_status(peer.status())


def of_status(status: Status) -> dict[str, object]:
    """The same of a status; figures that the round could not tell are not there."""
    return {
        "round": status.round,
        "members": len(status.members),
        "bytes_sent": status.bytes_sent,
        "bytes_received": status.bytes_received,
        "anchor_digest": status.anchor_digest,
        **{name: seconds for name in HELD if (seconds := getattr(status, name)) is not None},
        **status.diagnostics,
        **({"diagnosed_round": status.diagnosed_round} if status.diagnostics else {}),
    }


def conclude(context: TrainingContext, peer: "Peer | None", *, evaluate: bool) -> dict[str, Any]:
    """Evaluate what was reached and write ``summary.json``. The peer is still there, so that laggards can ask it."""
    seconds, busy = context.watch.seconds, context.watch.busy
    summary: dict[str, Any] = {
        "algorithm": context.manifest.outer.method,
        "solo": peer is None,
        "num_parameters": context.num_parameters,
        "inner_steps": context.num_steps,
        "tokens": context.num_steps * context.tokens_per_step,
        "seconds": seconds,
        "busy_seconds": busy,
        "utilisation": context.watch.utilisation,
    }
    progress = progress_alone(context) if peer is None else progress_of(peer)
    summary |= {"peer": "" if peer is None else peer.status().peer, **progress}
    if evaluate:
        anchor = live_fragments(context) if peer is None else peer.anchor()
        bits = record_round(context, anchor, progress, evaluate=True)
        assert bits is not None, "it was asked for"
        summary |= {"bits_per_byte": bits, "loss": bits * math.log(2)}
        if peer is not None:
            peer.log(held_out_loss=bits * math.log(2))  # the last status tells of the last anchor
    write_summary(context.out, summary)
    return summary


def progress_alone(context: TrainingContext) -> dict[str, object]:
    """The same for a baseline: rounds are the intervals at which a swarm would have met."""
    interval = context.manifest.inner.steps // context.manifest.outer.fragments
    return {"round": context.num_steps // interval, "members": 1, "bytes_sent": 0, "bytes_received": 0}


def live_fragments(context: TrainingContext) -> list[Tensor]:
    """What was learnt so far, fragment by fragment, flat float32: the average, of an optimizer that has one."""
    bare = context.accelerator.unwrap_model(context.model)
    parameters = dict(bare.named_parameters())
    fragments = schema_of(bare, context.manifest.outer.fragments).fragments
    context.averages.show()
    held = [gather(parameters, fragment) for fragment in fragments]
    context.averages.resume()
    return held
