"""From the directories that the processes of a demo left to its summary and its figure."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decentral.cli.demo.children import DemoProcess
from decentral.cli.demo.terms import DemoPlan
from decentral.cli.demo.watch import Churn
from decentral.errors import DecentralError, UsageError
from decentral.observe.metrics import read_metrics
from decentral.observe.report import SUMMARY_FILE, Curve, DemoSummary, dense_allreduce_nbytes
from decentral.observe.status import Status, read_status


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What a demo found."""

    summary: DemoSummary
    curves: Sequence[Curve]
    utilisation: float  # mean over the peers that lived to the end
    solo_bits_per_byte: float
    num_parameters: int


def collect(
    plan: DemoPlan, peers: Sequence[DemoProcess], solo: DemoProcess, churn: Churn, *, strays: int
) -> DemoResult:
    """Read every directory. Raises DecentralError when one that ended well left no summary."""
    ends = {peer.name: _read_summary(peer.directory) for peer in peers if not peer.killed}
    alone = _read_summary(solo.directory)
    lost = [_last_status(peer.directory) for peer in peers if peer.killed]
    first = ends["peer-0"]
    steps = [end["inner_steps"] for end in ends.values()] + [status.inner_steps for status in lost]
    sent = sum(end["bytes_sent"] for end in ends.values()) + sum(status.bytes_sent for status in lost)
    received = sum(end["bytes_received"] for end in ends.values()) + sum(status.bytes_received for status in lost)
    num_start = len(peers) - (churn.newcomer is not None)
    dense = dense_allreduce_nbytes(num_parameters=first["num_parameters"], steps=steps, num_peers=num_start)
    summary = DemoSummary(
        algorithm=plan.algorithm,
        peers=num_start,
        rounds=first["round"],
        inner_steps=first["inner_steps"],
        seconds=round(first["seconds"], 2),
        loss_first=plan.loss_first,
        loss_last=_mean(end["loss"] for end in ends.values()),
        loss_solo=alone["loss"],
        eval_bits_per_byte=_mean(end["bits_per_byte"] for end in ends.values()),
        bytes_sent=sent,
        bytes_received=received,
        bytes_dense_fp32_every_step=dense,
        reduction=round(dense / max(sent, 1), 1),
        anchor_digests={name: end["anchor_digest"] for name, end in ends.items()},
        killed=len(churn.killed),
        joined=int(churn.newcomer is not None),
        stray_processes=strays,
    )
    return DemoResult(
        summary,
        (_swarm_curve(plan, [peer.directory for peer in peers]), _solo_curve(plan, solo.directory)),
        _mean(end["utilisation"] for end in ends.values()),
        alone["bits_per_byte"],
        first["num_parameters"],
    )


def _read_summary(directory: Path) -> dict[str, Any]:
    path = directory / SUMMARY_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DecentralError(f"{path}: no summary was left ({error}); see stderr.txt beside it") from error
    assert isinstance(found, dict)
    return found


def _last_status(directory: Path) -> Status:
    try:
        return read_status(directory)
    except UsageError:  # killed before it wrote one
        return Status()


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _swarm_curve(plan: DemoPlan, directories: Sequence[Path]) -> Curve:
    """The anchor as the first peer saw it, over what every peer had trained and sent when that round ended."""
    tokens, nbytes, bits, seconds = [0.0], [0.0], [plan.bits_first], [0.0]
    began = _began(directories[0])
    everybody = [list(read_metrics(directory, "outer")) for directory in directories]
    for row in everybody[0]:
        if "bits_per_byte" in row:
            tokens.append(sum(_until(rows, row["round"], "tokens") for rows in everybody))
            nbytes.append(sum(_until(rows, row["round"], "bytes_sent") for rows in everybody))
            bits.append(row["bits_per_byte"])
            seconds.append(row["seconds"] - began)
    return Curve("swarm", tokens, nbytes, bits, seconds)


def _began(directory: Path) -> float:
    """When a peer's training began, on its log's clock: before that it waited for the others."""
    return next((float(row["seconds"]) for row in read_metrics(directory)), 0.0)


def _until(rows: Sequence[dict[str, Any]], round_: int, key: str) -> float:
    """A peer's count after a round; its last one when it was gone by then, 0 when it was not there yet."""
    return max((float(row[key]) for row in rows if row["round"] <= round_), default=0.0)


def _solo_curve(plan: DemoPlan, directory: Path) -> Curve:
    rows = [row for row in read_metrics(directory, "outer") if "bits_per_byte" in row]
    tokens = (0.0, *(row["tokens"] for row in rows))
    began = _began(directory)
    bits = (plan.bits_first, *(row["bits_per_byte"] for row in rows))
    return Curve("solo", tokens, (0.0,) * len(tokens), bits, (0.0, *(row["seconds"] - began for row in rows)))
