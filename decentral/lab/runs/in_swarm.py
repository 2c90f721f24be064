"""A cell of a method of ours: its peers as the laboratory's swarm has them, looked at now and then."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from decentral.lab.runs.cell import Cell
from decentral.lab.runs.curve import Curve, Looks, Point
from decentral.lab.runs.flipped import flipped
from decentral.lab.runs.reader import Reader
from decentral.lab.swarm import Course, LabWorld, lab_peers
from decentral.lab.work.base import Work

__all__ = ["run_swarm"]


def run_swarm(cell: Cell, work: Work) -> Curve:
    """The whole run, or up to where it gives no number any more."""
    manifest = cell.manifest
    modules = [work.model() for _ in range(cell.peers)]
    peers = lab_peers(manifest, modules)
    if cell.flips is not None:
        for peer in peers:
            peer.replica.method = flipped(peer.replica.method, cell.flips)
    numel = peers[0].live.schema.numel
    world = LabWorld(cell.peers) if cell.line is None else cell.line.world(cell.peers, numel)
    course = Course(work, peers, work.trained(modules), world)
    return _Looking(course, work, cell).curve()


class _Looking:
    """Goes along with a course."""

    def __init__(self, course: Course, work: Work, cell: Cell) -> None:
        self._course, self._reader = course, Reader(work, course.manifest.outer.fragments)
        self._tokens, self._steps = work.tokens_of_step, cell.steps
        self._looks = Looks(cell.steps, cell.points)
        self._nbytes = self._peak = 0.0

    def curve(self) -> Curve:
        found = [self._point(0)]
        for reached in self._course.go():
            self._nbytes += reached.nbytes
            self._peak = max(self._peak, reached.nbytes)
            step = reached.inner_steps / len(self._course.peers)
            if self._looks.due(step):
                found.append(self._point(reached.outer_step))
                if found[-1].loss is None:
                    break
            if step >= self._steps:
                break
        return Curve(tuple(found), self._peak, self._course.peers[0].live.schema.numel)

    def _point(self, rounds: int) -> Point:
        peers = self._course.peers
        step = sum(peer.steps for peer in peers) / len(peers)
        held = self._reader.held_out(self._replicas())
        loss, of_mean = (None if one is None or not math.isfinite(one) else one for one in (held.loss, held.of_mean))
        return Point(step, step * self._tokens, rounds, self._nbytes, self._course.now, loss, of_mean)

    def _replicas(self) -> list[Sequence[Tensor]]:
        replicas = [peer.replica for peer in self._course.peers]
        return [one.anchors for one in (replicas[:1] if replicas[0].agrees else replicas)]
