"""Options that several commands share, spelled once, and how one peer takes part by them. Imports no torch."""

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click

from decentral.cli.ports import with_metrics, with_page
from decentral.cli.quantities import HoursOfDay, Rate, Share, Size
from decentral.errors import UsageError
from decentral.preferences.preferences import ALWAYS, LEAST_MEMORY, Hours, Preferences
from decentral.quantities import moment_in

DEFAULT_DIRECTORY = Path("decentral-run")

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

as_json: Decorator = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")

directory_of_a_peer: Decorator = click.option(
    "--out",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=DEFAULT_DIRECTORY,
    show_default=True,
    help="Run directory of the peer.",
)


def remember(context: click.Context, directory: Path) -> Path:
    """Tell the error handler where an unexpected error may be written down."""
    context.find_root().obj.directory = directory
    return directory


def cards_by_name(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Of ``--listen``: a network card's addresses for its name. UsageError for a card that there is not."""
    if not any(one[:1] != "/" for one in given):
        return given
    from decentral.transport.interfaces import cards, listen_addresses

    return tuple(address for one in given for address in listen_addresses(one, cards()))


def presets_that_begin(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """For a shell that completes; methods of other packages are among them."""
    from decentral.optimizers.registry import presets

    return [name for name in presets() if name.startswith(begun)]


# ---- secrets ----
#
# A command line stands in the process list, where every user of the machine reads it, and in the shell's history. So
# what lets others in may be asked for, or lie in a file or in an environment variable, which its owner alone reads.

_MOST_CHARACTERS = 10_000  # of one secret: an invite has 4,096 at most, and may be broken over lines


@dataclass(frozen=True, slots=True)
class GivenSecret:
    """One that a command got."""

    option: str | None  # None: an argument
    written: str = field(repr=False)  # on the command line or in the environment
    text: str = field(repr=False)  # what that stands for
    typed: bool  # on the command line
    exposes: bool  # more than others may know

    @property
    def is_on_show(self) -> bool:
        """Tell whether all users of this machine can read it in the process list."""
        return self.typed and self.exposes and self.written == self.text


def secrets_of(context: click.Context) -> list[GivenSecret]:
    """Give those that a command was given, in their order."""
    found: list[GivenSecret] = context.meta.setdefault(__name__, [])
    return found


class Secret(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """Text that others should not read: ``-`` asks for it, ``@FILE`` reads it, else it is itself, with a warning where
    it was typed on the command line and ``exposes`` more than others may know.
    """

    name = "secret"

    def __init__(self, what: str, exposes: Callable[[str], bool] = lambda text: True) -> None:
        self._what, self.exposes = what, exposes

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """The text. UsageError where there is none."""
        text = self._meant_by(str(value))
        if parameter is not None and context is not None and parameter.name is not None:
            option = parameter.opts[0] if isinstance(parameter, click.Option) else None
            typed = context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
            given = GivenSecret(option, str(value), text, typed, self.exposes(text))
            secrets_of(context).append(given)
            if given.is_on_show and _speaks_for_its_peer():
                click.echo(self._warning(parameter), err=True)
        return text

    def _meant_by(self, written: str) -> str:
        if written == "-":
            return self._asked_for()
        return self._read(Path(written[1:])) if written.startswith("@") else written

    def _asked_for(self) -> str:
        if sys.stdin.isatty():
            return str(click.prompt(self._what, hide_input=True, err=True)).strip()
        if not (text := sys.stdin.readline(_MOST_CHARACTERS).strip()):
            raise UsageError(f"-: no {self._what} came on stdin; write it there in one line, or give @FILE")
        return text

    def _read(self, path: Path) -> str:
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(_MOST_CHARACTERS).strip()
                readable = os.name == "posix" and os.fstat(file.fileno()).st_mode & 0o077
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"@{path}: cannot be read ({why}); name a file that holds the {self._what}") from error
        if not text:
            raise UsageError(f"@{path}: is empty; name a file that holds the {self._what}")
        if readable and self.exposes(text):
            mend = f"chmod 600 {shlex.quote(str(path))}"
            click.echo(f"warning: @{path}: others of this machine may read the token in it; {mend}", err=True)
        return text

    def _warning(self, parameter: click.Parameter) -> str:
        name = parameter.opts[0] if isinstance(parameter, click.Option) else str(parameter.human_readable_name)
        variable = f", or set {parameter.envvar}" if parameter.envvar else ""
        return (
            f"warning: {name}: all users of this machine can read the token on its command line; give - to be asked "
            f"for it, or @FILE{variable}"
        )


def _speaks_for_its_peer() -> bool:
    """One of several processes of a peer does."""
    from decentral.cli.preflight import is_main

    return is_main()


def _has_token(text: str) -> bool:
    """Of an invite, for words say nothing once they were used."""
    from decentral.errors import InviteError
    from decentral.swarm.invite import PREFIX, Invite  # help texts need none of the wire

    if PREFIX not in text:
        return False
    try:
        return Invite.parse(text).token is not None
    except InviteError:  # said when it is used
        return False


INVITE = Secret("invite", _has_token)
TOKEN = Secret("token")


def with_admit(text: str) -> Decorator:
    """``--admit``, with what it does."""
    return click.option(
        "--admit",
        type=TOKEN,
        metavar="TOKEN",
        envvar="DECENTRAL_ADMIT",
        show_envvar=True,
        help=f"{text} - asks for it, @FILE reads it from a file.",
    )


# ---- how one peer takes part ----
#
# Whatever the run's terms are: ``start`` and ``join`` have all of these in common, ``follow`` some.


def _check_installed(context: click.Context, parameter: click.Parameter, kind: str | None) -> str | None:
    """Refused before anything is read or made."""
    from decentral.transport.choice import check_there

    check_there(kind)
    return kind


WAYS: tuple[Decorator, ...] = (  # how others are reached
    click.option(
        "--listen",
        multiple=True,
        metavar="ADDR",
        callback=cards_by_name,
        help="Multiaddr to listen on, repeatable, such as /ip4/0.0.0.0/tcp/4001, or a network card, such as eth1 or "
        "eth1:4001; all of them when not given.",
    ),
    click.option(
        "--relay",
        "relays",
        multiple=True,
        metavar="ADDR",
        help="Where a relay is, repeatable, as decentral relay prints it: peers behind routers meet through it.",
    ),
    click.option(
        "--lan/--no-lan",
        default=True,
        show_default=True,
        help="Announce this peer on its local networks (mDNS), and meet others of the run there: also when the "
        "invite is old or there is no internet.",
    ),
    click.option(
        "--transport",
        type=click.Choice(["daemon", "native", "py-libp2p"]),
        callback=_check_installed,
        help="How peers are reached: go-libp2p's daemon, libp2p over TCP in this process, or py-libp2p, which is "
        "an extra. The daemon where this system has one when not given; they speak to each other.",
    ),
)
CAPS: tuple[Decorator, ...] = (  # how fast
    click.option(
        "--max-upload",
        type=Rate(),
        metavar="RATE",
        help="Send no faster than this, over everything, such as 5mbit or 600kB/s. Votes go first.",
    ),
    click.option(
        "--max-download",
        type=Rate(),
        metavar="RATE",
        help="Receive no faster than this, such as 20mbit or 2.5MB/s.",
    ),
)
WHEN: tuple[Decorator, ...] = (  # and with how much of the machine; all of it can be set while the peer runs
    click.option(
        "--schedule",
        type=HoursOfDay(),
        default="always",
        metavar="HOURS",
        help="Train only in these hours, local time, such as 22:00-07:00; several with commas between.",
    ),
    click.option(
        "--on-battery",
        type=click.Choice(["train", "pause"]),
        default="train",
        show_default=True,
        help="What a laptop without mains power does.",
    ),
    click.option(
        "--only-when-idle",
        is_flag=True,
        help="Wait while somebody types at this machine, or other programs take more than a quarter of it.",
    ),
    click.option(
        "--max-memory",
        type=Size(least=LEAST_MEMORY),
        metavar="SIZE",
        help="Leave, with code 40, when this process holds more, as 8GB; 100MB or more.",
    ),
    click.option("--threads", type=click.IntRange(1, 1024), metavar="N", help="Compute with so many threads."),
    click.option(
        "--max-compute",
        type=Share(),
        metavar="SHARE",
        help="Compute for such a share of the time, as 70%, and rest after each step: less power, heat and noise.",
    ),
)


def options_of_a_peer(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add them to a command."""
    options: list[Decorator] = [
        click.option(
            "--data",
            type=click.Path(path_type=Path),
            metavar="PATH",
            help="Text to train on, a file or a folder; the standard library's source when not given.",
        ),
        click.option(
            "--out",
            "directory",
            type=click.Path(path_type=Path, file_okay=False),
            default=DEFAULT_DIRECTORY,
            show_default=True,
            help="Run directory; a run found there is resumed.",
        ),
        *WAYS,
        click.option(
            "--require-peers",
            type=click.IntRange(min=0),
            default=0,
            metavar="N",
            help="Wait with training until the run has N members, this one included.",
        ),
        click.option(
            "--join-timeout",
            "give_up_at",
            type=click.FloatRange(min=0, min_open=True),
            callback=lambda context, parameter, seconds: moment_in(seconds),
            metavar="S",
            help="Give up with exit code 20 when nobody, or fewer than N, came within S s of the command's start.",
        ),
        click.option(
            "--keep-serving",
            is_flag=True,
            help="After the run's end stay, also when started again, and give its last state to those who come late.",
        ),
        *CAPS,
        *WHEN,
        click.option(
            "--daily-upload",
            type=Size(),
            metavar="SIZE",
            help="Send no more than this a day (UTC), such as 20GB; then train on, and contribute again the next day.",
        ),
        click.option(
            "--offload",
            type=click.Path(file_okay=False, path_type=Path),
            help="Folder on a disk for what rounds need beside the model, where memory is short.",
        ),
        click.option(
            "--on-nan",
            type=click.Choice(["stop", "restart"]),
            default="stop",
            show_default=True,
            help="What NaN or Inf in this peer's progress does: end with one line, or go back to the anchor.",
        ),
        with_page,
        with_metrics,
        click.option(
            "--json",
            "as_json",
            is_flag=True,
            help="At the end, print summary.json on stdout, and nothing else there: the invite goes to stderr.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


# ---- the same, as an object ----
#
# From ``start`` and ``join`` to the loop that trains.


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What the command line says about this peer; what all peers agree on is in the manifest."""

    out: Path
    data: Path | None = None
    begins_from: Path | None = None  # model folder with the run's first weights; None: drawn from the run's seed
    listen: tuple[str, ...] = ()  # multiaddrs; none: all interfaces
    transport: str | None = None  # "daemon", "native", "py-libp2p"; None: the daemon where this system has one
    relays: tuple[str, ...] = ()  # multiaddrs
    lan: bool = True  # announced and looked for on the local networks
    alone: bool = False  # trains at once, and does not wait for a second member first
    require_peers: int = 0
    give_up_at: float | None = None  # monotonic seconds, when it looks for others no longer
    keep_serving: bool = False  # after the run's end, see join
    on_nan: Literal["stop", "restart"] = "stop"  # see join
    max_upload: float | None = None  # bytes/s
    max_download: float | None = None  # bytes/s
    daily_upload: int | None = None  # bytes
    schedule: Hours = ALWAYS  # hours of the day in which it trains
    on_battery: Literal["train", "pause"] = "train"
    only_when_idle: bool = False  # it waits while somebody uses the machine
    max_memory: int | None = None  # bytes
    offload: Path | None = None  # folder for what rounds need beside the model; None: memory
    threads: int | None = None  # that torch computes with
    max_compute: float | None = None  # share of the time
    admit: str | None = field(default=None, repr=False)  # admission token; None: the invite's, or the folder's
    invite: str | None = field(default=None, repr=False)  # None: this is the first peer
    solo: bool = False  # the baseline, without a swarm
    pace: Path | None = None  # a baseline keeps in step with the peer that runs there
    dashboard: bool = False  # the page beside it
    metrics: tuple[str, int] | None = None  # address and port at which Prometheus asks
    as_json: bool = False  # summary.json on stdout, and nothing else there

    @property
    def waits_for_company(self) -> bool:
        """True where it trains only once the run has, or had, a second member."""
        return self.invite is None and not (self.alone or self.require_peers)

    @property
    def preferences(self) -> Preferences:
        """What of it may be set anew while the peer runs."""
        return Preferences(
            schedule=self.schedule,
            on_battery=self.on_battery,
            only_when_idle=self.only_when_idle,
            max_memory=self.max_memory,
            threads=self.threads,
            max_compute=self.max_compute,
            max_upload=self.max_upload,
            max_download=self.max_download,
            daily_upload=self.daily_upload,
        )
