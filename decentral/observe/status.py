"""``status.json``: what the peer that runs in a directory is doing now.

The running peer replaces the file atomically about once a second, for its owner alone to read. The process is named
by its pid and its creation time together, because pids are reused.

A field of `Status` is declared once: its unit, and its names and meaning for Prometheus and for trackers of
experiments. Which fields a screen shows is a table below it. A new figure takes two files: the one that measures it,
and this one.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from decentral.errors import DiskError, FolderInUse, UsageError, VersionError
from decentral.observe.lines import json_value

STATUS_FILE = "status.json"
_MOST_TOLD = 5  # folders
STATUS_VERSION = 1
STATES = (
    *("starting", "looking", "syncing", "training", "following", "waiting", "paused", "resting", "leaving"),
    *("left", "done"),
)
ENDED = ("left", "done")  # last words: a peer that is gone in any other state was killed or crashed

# ---- the fields ----

Unit = Literal["count", "bytes", "bytes/s", "bit/s", "s", "nats"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number of a status, for screens and for the programs that are given numbers."""

    unit: Unit
    meaning: str = ""  # a sentence for Prometheus
    gauge: str = ""  # its name in Prometheus, behind ``decentral_peer_``; empty: it is none there
    counter: str = ""  # the same, of a number that only rises while the process lives
    tracker: str = ""  # its name in trackers, behind ``swarm/``; empty: it is not there
    logged: bool = False  # by the field's name in the rows of ``metrics.jsonl``, one after each round
    of: Callable[[Status], float | None] | None = None  # how it is made of the status; None: it is the field itself


def _quantity(
    default: T,
    unit: Unit,
    meaning: str = "",
    *,
    gauge: str = "",
    counter: str = "",
    tracker: str = "",
    logged: bool = False,
    of: Callable[[Status], float | None] | None = None,
) -> T:
    """Declare a field that is a quantity, or of which one is made."""
    return field(default=default, metadata={"quantity": Quantity(unit, meaning, gauge, counter, tracker, logged, of)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A peer at one moment. Times in seconds, rates in bytes per second, counts since the peer started."""

    state: str = "starting"  # one of STATES
    peer: str = ""  # libp2p name, 12D3KooW...
    name: str = ""  # what its person calls it
    names: Mapping[str, str] = field(default_factory=dict)  # what peers that are here, or were, call themselves
    run: str = ""  # name of the run
    run_id: str = ""  # hex digest of the manifest
    algorithm: str = ""
    round: int = _quantity(
        0, "count", "Outer steps made.", gauge="round", tracker="round", logged=True
    )  # it numbers the model
    rounds: int | None = None  # rounds the run has; None: no end
    epoch: int = 0
    inner_steps: int = _quantity(
        0, "count", "Inner steps of this peer, over all its lives.", gauge="inner_steps", tracker="inner_steps"
    )
    members: tuple[Mapping[str, Any], ...] = _quantity(  # peer, state, round, path... of everyone in the epoch
        (),
        "count",
        "Members of the epoch.",
        gauge="members",
        tracker="members",
        logged=True,
        of=lambda at: len(at.members),
    )
    shares: bool = False  # it is to be one replica with other machines, see ``stages``
    stages: tuple[Mapping[str, Any], ...] = ()  # of that replica: peer, first, stop, self, waits_for; none: it looks
    given_up: tuple[str, ...] = ()  # names of peers without whom the run went on although they were half of it or more
    given_up_seconds: float | None = _quantity(None, "s")  # since then; None: since before this process began
    given_up_rounds: int = 0  # outer steps made since then
    late_rounds: int | None = None  # rounds' steps beyond which those made alone count for nothing; None: all count
    waiting_for: tuple[str, ...] = ()  # names of the peers a blocked training loop waits for
    stalled_seconds: float = _quantity(  # unusual: many times as long as a round takes
        0.0, "s", "Without a round, where that is unusual; 0: as usual.", gauge="stalled_seconds"
    )
    stalled_by: str = ""  # what the round in progress waits for then, and for whom
    left_out_seconds: float | None = _quantity(  # since a commit did so; None: it is a member, or said farewell
        None,
        "s",
        "Since it was left out of the members; 0: it was not.",
        gauge="left_out_seconds",
        of=lambda at: at.left_out_seconds or 0.0,
    )
    left_out_round: int = 0  # outer steps made with that commit
    left_out_by: str = ""  # who led it; empty: this peer was behind then, and read of it later
    others_round: int | None = _quantity(  # outer steps that most others have made; None: this peer is not behind
        None,
        "count",
        "Outer steps that most others are ahead, once that lasts; 0: none.",
        gauge="rounds_behind",
        of=lambda at: 0 if at.others_round is None else max(0, at.others_round - at.round),
    )
    usual_round_seconds: float | None = _quantity(None, "s", tracker="round_seconds")  # None: none has ended here
    held_seconds: float | None = _quantity(  # None: no round has ended here
        None,
        "s",
        "Seconds of a round in which the training thread copies parameters.",
        gauge="held_seconds",
        tracker="held_seconds",
        logged=True,
    )
    checkpoint_held_seconds: float | None = _quantity(  # None before the first checkpoint
        None,
        "s",
        "Seconds in which it copies what a checkpoint holds.",
        gauge="checkpoint_held_seconds",
        tracker="checkpoint_held_seconds",
        logged=True,
    )
    wanted_members: int = 0  # members, this one included, for whom training waits before it begins; 0: it does not
    gone: tuple[str, ...] = ()  # names of the other members that were here last, while nobody is
    gone_left: bool = False  # whether those said goodbye, rather than fell silent
    rounds_seen: int = _quantity(
        0, "count", "Rounds that ended since this peer is a member, at most 100.", gauge="rounds_seen"
    )
    rounds_contributed: int = _quantity(
        0, "count", "Those of them that carry this peer's update.", gauge="rounds_contributed"
    )
    bytes_sent: int = _quantity(
        0, "bytes", "Bytes sent since the process began.", counter="sent_bytes", tracker="bytes_sent", logged=True
    )
    bytes_received: int = _quantity(
        0,
        "bytes",
        "Bytes received since the process began.",
        counter="received_bytes",
        tracker="bytes_received",
        logged=True,
    )
    bytes_measuring: int = _quantity(0, "bytes")  # sent to peers that measured this line; in none of the other counts
    bytes_per_round: float = _quantity(0.0, "bytes", tracker="bytes_per_round")  # sent, mean of the recent rounds
    model_here: int = _quantity(0, "bytes")  # of the model, while it is fetched at the beginning
    model_nbytes: int = _quantity(0, "bytes")  # and of the whole; 0: none is being fetched
    sent_per_second: float = _quantity(0.0, "bytes/s", "Bytes sent per second, of late.", gauge="send_rate_bytes")
    received_per_second: float = _quantity(
        0.0, "bytes/s", "Bytes received per second, of late.", gauge="receive_rate_bytes"
    )
    max_upload: float | None = _quantity(None, "bytes/s")  # caps; None: none
    max_download: float | None = _quantity(None, "bytes/s")
    daily_upload: int | None = _quantity(None, "bytes")  # a day (UTC); None: no limit
    sent_today: int = _quantity(0, "bytes")  # counted when there is a limit, over restarts
    written_today: int = _quantity(0, "bytes")  # to the disk, over restarts; UTC
    max_writes: int | None = _quantity(None, "bytes")  # a day; None: no limit
    disk_free: int | None = _quantity(  # None: not known
        None, "bytes", "Bytes that the disk of its folder has left.", gauge="disk_free_bytes"
    )
    checkpoint_nbytes: int | None = _quantity(  # None: this process wrote none
        None,
        "bytes",
        "Bytes of its newest checkpoint, of which three are kept.",
        gauge="checkpoint_bytes",
    )
    given_rounds: int = _quantity(  # this and those below: over all lives of the peer
        0, "count", "Commits with a contribution of this peer, over all its lives.", gauge="given_rounds"
    )
    given_tokens: int = _quantity(0, "count")  # 0: nobody says how many are behind a step
    given_seconds: float = _quantity(0.0, "s", "Seconds of training, over all its lives.", gauge="given_seconds")
    given_bytes: int = _quantity(0, "bytes")  # sent
    given_share: float | None = None  # of all contributions that the chain counts; None: it counts none
    uplink_bits: int = _quantity(0, "bit/s")  # from the transfers made; 0: none has filled the link yet
    next_sync_seconds: float | None = _quantity(None, "s")  # None: not known yet
    seconds_left: float | None = _quantity(None, "s")  # until the run is over, as it goes now; None: not known yet
    loss: float | None = _quantity(None, "nats", "Nats per token.", gauge="loss")  # of an inner step, or as logged
    held_out_loss: float | None = _quantity(  # of the anchor; None: never evaluated
        None, "nats", "Nats per token.", gauge="held_out_loss"
    )
    sample: Mapping[str, Any] = field(default_factory=dict)  # prompt, text with it, round: what the model says
    own_loop: bool = False  # beside a script's loop, by decentral.join; not one of decentral start or join
    trains_while_paused: bool = False  # a loop of one's own trains on, and holds back contributions only
    anchor_digest: str = ""
    num_parameters: int = 0  # that are trained; 0: not known yet
    open_round: Mapping[str, Any] | None = None  # the round in progress: round, members, offers, leader, ballot, votes
    kinds: Mapping[str, Any] = field(default_factory=dict)  # bytes sent and received, by kind of message
    invite: str = ""  # without the admission token, which is no news: `decentral.swarm.invite.whole_invite` adds it
    addresses: tuple[str, ...] = ()
    reachability: str = ""  # public, nat, symmetric nat, firewall, local, unknown; empty before it was looked at
    relays: tuple[str, ...] = ()  # where others may reach this peer through
    silent_relays: tuple[str, ...] = ()  # HOST:PORT of those that do not answer
    notices: tuple[str, ...] = ()  # sentences on peers whose updates stand out, the newest first
    diagnostics: Mapping[str, float] = field(default_factory=dict)  # figures of the newest round that had any, by name
    diagnosed_round: int = 0  # outer steps made with that round; 0: none had any
    diagnosed_part: bool = False  # those between peers are of the part of a reduce that this peer summed
    out_of_band: tuple[str, ...] = ()  # names of the figures that are out of their bands
    paused_because: tuple[str, ...] = ()  # in words, while it is paused; empty: nobody said why
    finishing: bool = False  # it leaves with the next round that is committed
    preferences: Mapping[str, str] = field(default_factory=dict)  # what this volunteer wants otherwise than usual
    kept_settings: tuple[str, ...] = ()  # names of those that were set while a peer ran here, and outlive it
    problem: str = ""  # one sentence when something is wrong, empty when nothing is
    write_failed: int = _quantity(0, "count", "1 where a write that failed ended it.", gauge="write_failed")
    health: str = ""  # the sentence of health.py
    pid: int = 0
    process_created: float = 0.0  # seconds since the epoch, by the clock of its start
    process_born: str = ""  # boot and tick of its start, which no step of a clock moves; empty: not told here
    library: str = ""  # version of this library, by which it was written
    updated: float = _quantity(0.0, "s", "When the status was written, since the epoch.", gauge="updated_seconds")
    updated_monotonic: float = 0.0  # the same moment by the machine's monotonic clock, which stands still in its sleep
    written_every: float = 0.0  # seconds; 0: it was written once, and need not be again
    frozen_seconds: float = _quantity(  # found by who reads it
        0.0, "s", "Without a status, though its process lives; 0: as usual.", gauge="frozen_seconds"
    )

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Status:
        """Take the fields that are known and leave the others at their defaults."""
        known = {f.name for f in fields(cls)}
        taken: dict[str, Any] = {key: value for key, value in values.items() if key in known}  # Any: JSON
        for known_field in fields(cls):
            if isinstance(known_field.default, tuple) and known_field.name in taken:
                taken[known_field.name] = tuple(taken[known_field.name] or ())
        return cls(**taken)


# ---- the quantities ----

QUANTITIES: Mapping[str, Quantity] = {
    **{declared.name: declared.metadata["quantity"] for declared in fields(Status) if declared.metadata},
    "live_members": Quantity(
        "count",
        "Members that are here, this one included.",
        gauge="live_members",
        of=lambda at: sum(presence(member) == "live" for member in at.members),
    ),
    "contributed": Quantity(
        "count", tracker="contributed", of=lambda at: at.rounds_contributed / at.rounds_seen if at.rounds_seen else None
    ),
}


def number_of(status: Status, name: str) -> float | None:
    """Return the quantity ``name`` of ``status``; None: it is not known."""
    made = QUANTITIES[name].of
    value: float | None = getattr(status, name) if made is None else made(status)
    return value


# ---- what screens show ----
#
# Rows from top to bottom, each a label and the field that it is about. A screen has words of its own for fields that it
# tells more of than the number; every other one is shown in its unit.

Rows = tuple[tuple[str, str], ...]

STATUS_LINES: Rows = (  # of ``decentral status``
    ("run", "run"),
    ("peer", "peer"),
    ("loss", "loss"),
    ("says", "sample"),
    ("left", "seconds_left"),
    ("traffic", "bytes_sent"),
    ("besides", "bytes_measuring"),
    ("given", "given_rounds"),
    ("disk", "written_today"),
    ("limits", "max_upload"),
    ("settings", "preferences"),
    ("uplink", "uplink_bits"),
    ("members", "members"),
    ("updates", "diagnostics"),
)
LIVE_CELLS: tuple[Rows, ...] = (  # of the live view on the terminal of a peer: two in a row
    (("run", "run"), ("round", "round")),
    (("model", "model_nbytes"),),
    (("loss", "loss"), ("held-out loss", "held_out_loss")),
    (("inner steps", "inner_steps"), ("left", "seconds_left")),
    (("sent", "bytes_sent"), ("received", "bytes_received")),
)
WATCH_ROWS: Rows = (  # of this peer's panel in ``decentral watch``: where there is little room the last are given up
    ("state", "state"),
    ("useful", "rounds_contributed"),
    ("loss", "loss"),
    ("held-out", "held_out_loss"),
    ("sent", "bytes_sent"),
    ("received", "bytes_received"),
    ("caps", "max_upload"),
    ("today", "daily_upload"),
    ("reached", "reachability"),
    ("uplink", "uplink_bits"),
    ("steps", "inner_steps"),
    ("saved", "num_parameters"),
    ("name", "peer"),
    ("version", "library"),
)
PAGE_ROWS: Rows = (  # of this peer's card on the page of ``decentral dashboard``
    ("Name", "peer"),
    ("State", "state"),
    ("Round", "round"),
    ("Contributed", "rounds_contributed"),
    ("Sends", "sent_per_second"),
    ("Receives", "received_per_second"),
    ("Today (UTC)", "daily_upload"),
    ("Disk today (UTC)", "written_today"),
    ("Uplink", "uplink_bits"),
    ("Loss", "loss"),
    ("Reached", "reachability"),
    ("Version", "library"),
)


# ---- the file ----


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process that cannot be confused with a later one of the same number."""

    pid: int = field(default_factory=os.getpid)
    created: float = field(default_factory=lambda: psutil.Process().create_time())
    born: str = ""  # found out when it is alive, unless given

    def __post_init__(self) -> None:
        if not self.born and self.is_alive():
            object.__setattr__(self, "born", _born(self.pid))

    def is_alive(self) -> bool:
        """Tell whether this very process still runs (a zombie does not)."""
        try:
            process = psutil.Process(self.pid)
            now = _born(self.pid) if self.born else ""
            same = now == self.born if now else abs(process.create_time() - self.created) < 1.0
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def _born(pid: int) -> str:
    """Return, on Linux, the boot and the ticks after it. A creation time is counted from today's clock, and a step of
    that made every process another one. Empty where it cannot be had.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        after_the_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        return f"{boot} {after_the_name.split()[19]}"
    except (OSError, IndexError):
        return ""


def write_status(directory: Path, status: Status, process: ProcessInfo, *, every: float = 0.0) -> None:
    """Replace ``status.json`` in one step, so that a reader never sees half of it.

    ``every``: seconds until it is written again, for as long as the process is well; 0: nobody is to wait for that.
    """
    stamped = replace(
        status,
        pid=process.pid,
        process_created=process.created,
        process_born=process.born,
        updated=time.time(),
        updated_monotonic=time.monotonic(),
        written_every=every,
        library=_library(),
    )
    text = json.dumps({"version": STATUS_VERSION, **json_value(asdict(stamped))}, indent=1) + "\n"
    temporary = directory / f".{STATUS_FILE}.{process.pid}"
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process: its mode would stay
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(directory / STATUS_FILE)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if status.state in ENDED and _overwrite(directory / STATUS_FILE, text):
            return
        raise DiskError(f"{directory}: status cannot be written ({error.strerror}); free some space") from error


def _overwrite(path: Path, text: str) -> bool:
    """Put a last word where the one before stands, if it has room there: a full disk has none for a second file."""
    written = text.encode()
    try:
        with path.open("r+b") as file:
            stat = os.fstat(file.fileno())
            if len(written) > max(stat.st_size, 512 * getattr(stat, "st_blocks", 0)):
                return False
            file.write(written)
            file.truncate()
    except OSError:
        return False
    return True


@functools.cache
def _library() -> str:
    from importlib.metadata import PackageNotFoundError, version  # 0.05 s: only who writes one pays

    try:
        return version("decentral")
    except PackageNotFoundError:  # run from a folder of sources
        return ""


def read_status(directory: Path) -> Status:
    """Read what the peer in ``directory`` last said of itself.

    Raises UsageError when none ever ran there, VersionError when another version of this library wrote it.
    """
    version, status = _read(directory / STATUS_FILE)
    if version != STATUS_VERSION:
        raise VersionError(
            f"{directory / STATUS_FILE}: another version of decentral wrote it (format {version!r}, this one reads "
            f"{STATUS_VERSION}); ask with the version that runs there"
        )
    return status


def _read(path: Path) -> tuple[object, Status]:
    """Return the format's version, and the fields that are known."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return values.get("version"), Status.from_mapping(values)
    except FileNotFoundError:
        way_out = f"name the directory it was started with by --out{_elsewhere(path.parent)}"
        raise UsageError(f"{path.parent}: no peer has run here; {way_out}") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not readable ({error}); the peer replaces it while it runs, ask again") from error


def _elsewhere(directory: Path) -> str:
    """Name the newest folders in which peers ran, of those in it, as in a demo's, or here: a script's is called after
    its run.
    """
    within = list(directory.glob(f"*/{STATUS_FILE}")) or Path().glob(f"*/{STATUS_FILE}")
    found = sorted(within, key=lambda file: file.stat().st_mtime, reverse=True)
    return ": " + ", ".join(shlex.quote(str(file.parent)) for file in found[:_MOST_TOLD]) if found else ""


def presence(member: Mapping[str, Any]) -> str:
    """Return how one of a status' members is, in a word: ``live``, ``left`` with a goodbye, or ``gone`` without."""
    if member.get("live", True):
        return "live"
    return "left" if member.get("left") else "gone"


def is_running(status: Status) -> bool:
    """Tell whether the process that wrote this status still lives."""
    return ProcessInfo(status.pid, status.process_created, status.process_born).is_alive()


def is_lost(status: Status) -> bool:
    """Tell whether the process that wrote this status is gone without having said so: killed, or crashed."""
    return status.state not in ENDED and not is_running(status)


SILENT_AFTER = 15.0  # s: a lease, after which the others wait for a peer no more; its thread writes once a second
STOPPED_AFTER = 3.0  # s, where the system says that the process is stopped


def is_stopped(status: Status) -> bool:
    """Tell whether the process that wrote this status is stopped by a signal, or by who debugs it."""
    try:
        return psutil.Process(status.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def silent_for(status: Status, monotonic: float) -> float:
    """Return the seconds for which a living process owes its status; 0: it has written it, or need not.

    ``monotonic``: this machine's clock, whose time does not pass while it sleeps, so that a laptop that was opened a
    moment ago finds nobody frozen.
    """
    if not status.written_every or status.state in ENDED:
        return 0.0
    silent = monotonic - status.updated_monotonic
    if silent <= max(STOPPED_AFTER, 3 * status.written_every) or not is_running(status):
        return 0.0
    return silent if silent > max(SILENT_AFTER, 5 * status.written_every) or is_stopped(status) else 0.0


def check_free(directory: Path, own: int | None = None) -> None:
    """Raise FolderInUse when a peer lives in ``directory``: two writers would spoil one another's checkpoints.

    ``own``: a process that may have been there, and has ended what it did.
    """
    if not (directory / STATUS_FILE).exists():
        return
    try:
        _, status = _read(directory / STATUS_FILE)  # of whatever version: after an update a run goes on in its folder
    except UsageError:  # cut short by a power cut: whoever lives there writes it again, and holds the lock
        return
    if status.pid != own and is_running(status):
        raise FolderInUse(f"{directory}: a peer runs here already (process {status.pid}); choose another --out")
