"""What ``decentral doctor`` looks at. Each check says what it found and, when something is missing, what to
do.
"""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from decentral.cli.doctor.network import network
from decentral.cli.doctor.reached import reachable
from decentral.cli.failure import one_line
from decentral.cli.findings import Finding
from decentral.errors import DecentralError

_PACKAGES = ("torch", "hivemind", "accelerate", "transformers")
_LOW_DISK_NBYTES = 2 * 10**9  # three checkpoints of a 100 M parameter model with its optimizer are 3.6 GB
_LOW_MEMORY_NBYTES = 2 * 10**9
_ANSWER_SECONDS = 20.0


def examine(
    directory: Path, invite: str | None, *, listen: tuple[str, ...] = (), relays: tuple[str, ...] = ()
) -> list[Finding]:
    """Run every check; none of them raises."""
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": _versions,
        "machine": _machine,
        "disk": lambda: _disk(directory),
        "listening": lambda: _listening(listen),
        "network": lambda: network(relays),
        "reached": lambda: reachable(listen, relays, invite),
    }
    if invite is not None:
        checks["invite"] = lambda: _reach(invite)
    return [finding for name, check in checks.items() for finding in _guarded(name, check)]


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except DecentralError as error:
        yield Finding("fail", name, one_line(str(error)))
    except Exception as error:  # noqa: BLE001  a doctor reports what is broken, whatever it is
        yield Finding("fail", name, f"{type(error).__name__}: {one_line(str(error))}")


def _versions() -> Iterator[Finding]:
    found = [f"decentral {_version('decentral')}", f"Python {platform.python_version()}"]
    found += [f"{name} {_version(name)}" for name in _PACKAGES if _version(name)]
    yield Finding("ok", "versions", ", ".join(found))
    from decentral.transport.choice import default_kind

    if default_kind() == "daemon":
        yield Finding("ok", "transport", "go-libp2p daemon through hivemind")
    else:
        yield Finding("ok", "transport", "native: libp2p over TCP in this process; there is no hivemind here")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _machine() -> Iterator[Finding]:
    import psutil
    import torch

    cores, memory = os.cpu_count() or 1, psutil.virtual_memory()
    detail = f"{cores} cores, {memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB memory free"
    yield Finding("ok" if memory.available > _LOW_MEMORY_NBYTES else "warn", "machine", detail)
    if torch.cuda.is_available():
        name, total = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
        yield Finding("ok", "device", f"{name}, {total / 1e9:.1f} GB")
    else:
        yield Finding("ok", "device", "CPU; no CUDA device is visible to torch")


def _disk(directory: Path) -> Iterator[Finding]:
    place = next((p for p in (directory.absolute(), *directory.absolute().parents) if p.exists()), Path("/"))
    free = shutil.disk_usage(place).free
    if not os.access(place, os.W_OK):
        yield Finding("fail", "disk", f"{place} is not writable; choose another place with --out")
    elif free < _LOW_DISK_NBYTES:
        yield Finding("warn", "disk", f"{free / 1e9:.1f} GB free at {place}; checkpoints need room, free some")
    else:
        yield Finding("ok", "disk", f"{free / 1e9:.1f} GB free at {place}")


def _listening(wanted: tuple[str, ...]) -> Iterator[Finding]:
    """Start the transport with a throw-away identity, list where it can be dialled, end it."""
    import anyio

    from decentral.swarm.identity import Identity
    from decentral.transport.choice import default_kind, make_transport

    async def listen() -> tuple[str, ...]:
        with tempfile.TemporaryDirectory() as folder:
            identity = Identity.load_or_create(Path(folder) / "identity.key")
            async with make_transport(None, identity, wanted or None) as transport:
                return transport.addresses()

    addresses = anyio.run(listen)
    hosts = sorted({address.split("/")[2] for address in addresses})
    yield Finding("ok", default_kind(), f"starts, listens on {', '.join(hosts) or 'nothing'}")
    yield _lan(addresses)


def _lan(addresses: tuple[str, ...]) -> Finding:
    """Whether peers of one run would meet on this machine's networks without an invite that leads to somebody."""
    from decentral.swarm.announcement import host_of, local_addresses

    hosts = dict.fromkeys(map(host_of, local_addresses(addresses)))
    if not hosts:
        return Finding("ok", "lan", "no private network here; others are met by their invite only")
    from decentral.swarm.mdns import usable_hosts

    try:
        return Finding("ok", "lan", f"peers of one run meet by multicast DNS on {', '.join(usable_hosts([*hosts]))}")
    except DecentralError as error:
        return Finding("warn", "lan", one_line(str(error)))


def _reach(invite: str) -> Iterator[Finding]:
    """Ask a peer of the run for its terms, as ``join`` would."""
    from decentral.peer import fetch_manifest

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        manifest = fetch_manifest(invite, folder, join_timeout=_ANSWER_SECONDS)
    seconds = time.monotonic() - began
    yield Finding(
        "ok", "invite", f"run {manifest.run.name} answered in {seconds:.1f} s; decentral join will work from here"
    )
