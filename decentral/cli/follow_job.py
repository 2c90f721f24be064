"""A follower from its start to its end: writes the anchors that come, says so, ends with the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from decentral.cli.group import stop_signals
from decentral.errors import UsageError
from decentral.manifest import summary
from decentral.node.follower import Anchor
from decentral.observe.beacon import Beacon
from decentral.observe.requests import FOLLOWERS_TOO, Request, only_follows
from decentral.observe.screen import HINT_SECONDS, hint_after, invite_for, log_shown_by
from decentral.observe.status import Status
from decentral.peer.following import Following, follow
from decentral.quantities import time_left
from decentral.state.delta import AnchorFolder
from decentral.wire.keys import peer_name

FOLDER = "anchors"
NOBODY = "nobody has answered yet, looking on: is a peer of the run up? --join-timeout S gives up by itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOptions:
    """The options of ``decentral follow``."""

    out: Path
    every: int
    keep: int
    deltas: bool
    until_end: bool
    listen: tuple[str, ...] | None  # None: all interfaces
    relays: tuple[str, ...]
    lan: bool
    transport: str | None
    give_up_at: float | None  # monotonic s
    keep_serving: bool
    max_upload: float | None  # bytes/s
    max_download: float | None
    max_disk: int | None  # bytes
    as_json: bool


def run_follow(invite: str, options: FollowOptions) -> int:
    """Follow until the run is over, or a signal; returns the exit code."""
    anchors = AnchorFolder(options.out / FOLDER, options.keep, deltas=options.deltas)
    following = follow(
        invite,
        out=options.out,
        every=options.every,
        listen=options.listen,
        relays=options.relays,
        lan=options.lan,
        transport=options.transport,
        join_timeout=time_left(options.give_up_at),
        max_upload=options.max_upload,
        max_download=options.max_download,
        max_disk=options.max_disk,
        kept_files=options.keep * (2 if options.deltas else 1),
        keep_serving=options.keep_serving,
    )
    click.echo("looking for the run's peers ...", err=True)
    with stop_signals() as stop, ExitStack() as stack:
        stack.enter_context(log_shown_by(lambda line: click.echo(line, err=True)))
        with hint_after(HINT_SECONDS, NOBODY):
            stack.enter_context(following)
        job = _Job(following, anchors, options)
        stack.enter_context(Beacon(options.out, job.status, job.obey))
        stop.gently(following.leave)
        job.run()
    if stop.code is not None:
        click.echo(f"ended; the same command goes on from {options.out}", err=True)
    return stop.code or 0


class _Job:
    """Writes what comes, and knows how far it is."""

    def __init__(self, following: Following, anchors: AnchorFolder, options: FollowOptions) -> None:
        self._following, self._anchors, self._options = following, anchors, options
        self._newest: Anchor | None = None
        self._over = False

    def run(self) -> None:
        """Until the run is over, or somebody asks to leave."""
        following, options = self._following, self._options
        click.echo(summary(following.manifest), err=True)
        if following.num_frozen:
            click.echo(f"{following.num_frozen} parameters are not trained: anchors do not hold them", err=True)
        for anchor in following:
            self._write(anchor)
            if not options.until_end:
                break
        if self._newest is not None and self._newest.final:
            latest = self._anchors.latest() or {}
            click.echo(f"This run is over: its last anchor is {self._anchors.folder / latest['file']}", err=True)
            if options.keep_serving:
                self._serve()
        self._over = True

    def _write(self, anchor: Anchor) -> None:
        """Unless an earlier process wrote this very one."""
        self._newest = anchor
        latest = self._anchors.latest() or {}
        if (latest.get("round"), latest.get("digest"), latest.get("final")) == (
            *(anchor.round, anchor.digest, anchor.final),
        ):
            return
        about = {"run": self._following.manifest.digest.hex(), "final": anchor.final, "peer": anchor.peer}
        path = self._anchors.write(anchor.round, anchor.digest, anchor.named, about)
        said: dict[str, Any] = {"round": anchor.round, "digest": anchor.digest, "path": str(path), **about}
        click.echo(json.dumps(said) if self._options.as_json else str(path))
        whose = f" of {anchor.peer}: in gossip each peer has its own" if anchor.peer else ""
        click.echo(f"round {anchor.round}, anchor {anchor.digest[:12]}{whose}", err=True)

    def _serve(self) -> None:
        line = invite_for(sys.stderr, self._following.invite)
        click.echo(f"its last state can be had here until Ctrl-C: decentral join {line}", err=True)
        self._following.serve()

    def obey(self, request: Request) -> None:
        """Leave; raises UsageError for what is asked of who trains."""
        if request.name not in FOLLOWERS_TOO:
            raise UsageError(only_follows(self._options.out, request.name))
        self._following.leave()

    def status(self) -> Status:
        """Return what ``decentral status --out`` shows."""
        following, newest = self._following, self._newest
        made = newest.round if newest is not None else following.head.outer_step
        terms = following.manifest
        return Status(
            state=("done" if newest is not None and newest.final else "left") if self._over else "following",
            peer=peer_name(following.peer),
            run=terms.run.name,
            run_id=terms.digest.hex(),
            algorithm=terms.outer.method,
            round=made,
            rounds=terms.run.rounds,
            epoch=following.head.epoch,
            members=tuple(self._members()),
            bytes_sent=following.traffic.total.sent,
            bytes_received=following.traffic.total.received,
            anchor_digest=newest.digest if newest is not None else "",
            invite=following.invite_to_write,
            silent_relays=following.silent_relays,
        )

    def _members(self) -> Iterator[dict[str, object]]:
        """The rows of ``decentral peers``: this follower is none of them."""
        live, traffic = self._following.live, self._following.traffic
        for member in self._following.head.members:
            count = traffic.of(member)
            counted = {"bytes_sent": count.sent, "bytes_received": count.received}
            yield {"peer": peer_name(member), "live": member in live, **counted}
