"""The keeping of each other's state, made for one node as the terms say."""

from __future__ import annotations

from decentral.flow.waiting import Offload
from decentral.manifest import Manifest
from decentral.node.upload import DailyUpload
from decentral.redundancy.giver import WayOut
from decentral.redundancy.labels import Seals
from decentral.redundancy.recovery import RedundancyService
from decentral.rounds.driver import Driver
from decentral.swarm.directory import Directory
from decentral.transport import Transport
from decentral.wire.keys import PeerId, Signer


def redundancy_of(
    manifest: Manifest,
    signer: Signer,
    transport: Transport,
    directory: Directory,
    driver: Driver,
    daily_upload: DailyUpload | None,
    offload: Offload,
) -> RedundancyService | None:
    """None where the terms do not ask for it: then nothing of it is served, or sent."""
    terms = manifest.swarm.redundancy
    if terms is None:
        return None

    def others() -> dict[PeerId, tuple[str, ...]]:
        members = driver.head.members
        return {peer: lease.addresses for peer, lease in directory.live().items() if peer in members}

    way_out = WayOut(
        transport=transport,
        others=others,
        may_send=lambda: daily_upload is None or not daily_upload.used_up,
        is_quiet=lambda: transport.meter.is_idle,
    )
    seals = Seals(signer, manifest.digest)
    members, live = lambda: driver.head.members, lambda: tuple(directory.live())
    return RedundancyService(terms, seals, way_out, members=members, live=live, offload=offload)
