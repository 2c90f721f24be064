"""Options that several commands share, spelled once, and how one peer takes part by them. Imports no torch."""

import functools
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, cast

import click

from decentral.cli.ports import with_metrics, with_page
from decentral.cli.quantities import HoursOfDay, Rate, Share, Size
from decentral.errors import UsageError
from decentral.peer.settings import OPTIONS, JoinOptions
from decentral.preferences.preferences import LEAST_MEMORY, Preferences
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


class GroupedOptions(click.Command):
    """A command with so many options that its help has them under headings."""

    def __init__(self, *args: Any, headings: Mapping[str, Sequence[str]], **extra: Any) -> None:  # Any: click's own
        """``headings``: names of parameters by their heading; those in none stand first."""
        super().__init__(*args, **extra)
        self._headings = {name: heading for heading, names in headings.items() for name in names}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the words as they were typed, for who starts the command again elsewhere."""
        ctx.meta[f"{__name__}.typed"] = tuple(args)
        return super().parse_args(ctx, args)

    @staticmethod
    def words_typed(context: click.Context) -> tuple[str, ...]:
        """Return what was typed behind the command's name."""
        words: tuple[str, ...] = context.meta[f"{__name__}.typed"]
        return words

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under their headings, in the order in which headings were given."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Options", *self._headings.values())}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
                sections[self._headings.get(str(parameter.name), "Options")].append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


HEADINGS = {  # of start and join, most used first
    "With whom": ("require_peers", "give_up_at", "alone", "admit", "keep_serving", "solo", "pace"),
    "Network": ("listen", "relays", "lan", "transport", "max_upload", "max_download", "daily_upload"),
    "This machine": (
        *("schedule", "on_battery", "only_when_idle", "max_memory", "threads", "max_compute"),
        *("memory", "share", "max_writes", "max_text", "offload", "on_nan"),
    ),
    "What is shown": ("name", "verbose", "dashboard", "metrics", "as_json"),
}


def remember(context: click.Context, directory: Path) -> Path:
    """Tell the error handler where an unexpected error may be written down."""
    context.find_root().obj.directory = directory
    return directory


def cards_by_name(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Give ``--listen`` a network card's addresses for its name. UsageError for a card that there is not."""
    if not any(one[:1] != "/" for one in given):
        return given
    from decentral.transport.interfaces import cards, listen_addresses

    return tuple(address for one in given for address in listen_addresses(one, cards()))


def presets_that_begin(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """For a shell that completes; methods of other packages are among them."""
    from decentral.optimizers import presets

    return [name for name in presets() if name.startswith(begun)]


# ---- secrets ----
#
# A command line stands in the process list, where every user of the machine reads it, and in the shell's history. So
# what lets others in may be asked for, or lie in a file or in an environment variable, which its owner alone reads.

_MOST_CHARACTERS = 10_000  # of one secret: an invite has 4,096 at most, and may be broken over lines


@dataclass(frozen=True, slots=True)
class GivenSecret:
    """A secret that a command was given."""

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
            return self._ask()
        return self._read(Path(written[1:])) if written.startswith("@") else written

    def _ask(self) -> str:
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
    """Tell whether this process is the one of its peer that talks to people."""
    from decentral.cli.preflight import is_main

    return is_main()


def _has_token(text: str) -> bool:
    """Tell whether an invite holds a token; words do not matter, as they say nothing once they were used."""
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


def _check_name(context: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    """Refuse one that cannot travel, before anything is read or made."""
    option = OPTIONS["name"]
    if not option.fits(name):
        raise click.BadParameter(f"{name!r:.40}: {option.rule}")
    return name


def option_of_join(name: str, *, flag: str = "", kept_as: str = "", also: str = "", **click_has: Any) -> Decorator:
    """Offer an option of ``join`` on the command line: its default and its meaning are those of `JoinOptions`.

    ``also``: what only the command line knows. The rest is click's own.
    """
    option = OPTIONS[name]
    meaning = f"{option.meaning} {also}".strip()
    return click.option(
        flag or f"--{name.replace('_', '-')}", kept_as or name, default=option.default, help=meaning, **click_has
    )


WAYS: tuple[Decorator, ...] = (  # how others are reached
    option_of_join(
        "listen",
        multiple=True,
        metavar="ADDR",
        callback=lambda *asked: cards_by_name(*asked) or None,
        also="Repeatable; a network card does, too, such as eth1 or eth1:4001.",
    ),
    option_of_join("relays", flag="--relay", multiple=True, metavar="ADDR", also="Repeatable."),
    option_of_join("lan", flag="--lan/--no-lan", show_default=True),
    option_of_join("transport", type=click.Choice(["daemon", "native", "py-libp2p"]), callback=_check_installed),
)
CAPS: tuple[Decorator, ...] = (  # how fast
    option_of_join("max_upload", type=Rate(), metavar="RATE", show_default="no limit"),
    option_of_join("max_download", type=Rate(), metavar="RATE", show_default="no limit"),
)
WHEN: tuple[Decorator, ...] = (  # and with how much of the machine; all of it can be set while the peer runs
    click.option(
        "--schedule",
        type=HoursOfDay(),
        default="always",
        show_default=True,
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
        show_default="no limit",
        help="Leave, with code 40, when this process holds more, as 8GB; 100MB or more.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(1, 1024),
        metavar="N",
        show_default="as torch chooses",
        help="Compute with so many threads.",
    ),
    click.option(
        "--max-compute",
        type=Share(),
        metavar="SHARE",
        show_default="100%",
        help="Compute for such a share of the time, as 70%, and rest after each step: less power, heat and noise.",
    ),
)


def with_options(*options: Decorator) -> Decorator:
    """Add them to a command, in their order."""
    return lambda command: functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


options_of_a_peer = with_options(
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
    option_of_join("name", metavar="NAME", callback=_check_name, show_default="none"),
    *WAYS,
    option_of_join("require_peers", type=click.IntRange(min=0), metavar="N", show_default=True),
    option_of_join(
        "join_timeout",
        kept_as="give_up_at",
        type=click.FloatRange(min=0, min_open=True),
        callback=lambda context, parameter, seconds: moment_in(seconds),
        metavar="S",
        show_default="never",
        also="S seconds from the command's start; the exit code is 20 then.",
    ),
    option_of_join("keep_serving", is_flag=True),
    *CAPS,
    *WHEN,
    option_of_join("daily_upload", type=Size(), metavar="SIZE", show_default="no limit"),
    option_of_join("max_writes", type=Size(), metavar="SIZE", show_default=True),
    option_of_join("memory", type=Size(), metavar="SIZE", show_default="all of the model"),
    option_of_join("share", is_flag=True),
    option_of_join("offload", type=click.Path(file_okay=False, path_type=Path), show_default="memory"),
    option_of_join("on_nan", type=click.Choice(["stop", "restart"]), show_default=True),
    click.option("-v", "--verbose", is_flag=True, help="Show the run's terms, too, as its manifest has them."),
    with_page,
    with_metrics,
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="At the end, print summary.json on stdout, and nothing else there: the invite goes to stderr.",
    ),
)


# ---- the same, as an object ----
#
# From ``start`` and ``join`` to the loop that trains.


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of a job: what the command line says about this peer; what all peers agree on is in the manifest."""

    out: Path
    data: Path | None = None
    begins_from: Path | None = None  # model folder with the run's first weights; None: drawn from the run's seed
    give_up_at: float | None = None  # monotonic seconds, when it looks for others no longer
    join: JoinOptions = field(default_factory=JoinOptions, repr=False)  # the rest of what ``join`` takes from there
    preferences: Preferences = field(default_factory=Preferences)  # what may be set anew while the peer runs
    invite: str | None = field(default=None, repr=False)  # None: this is the first peer
    solo: bool = False  # the baseline, without a swarm
    max_text: int | None = None  # bytes of the run's text that are fetched at most
    pace: Path | None = None  # a baseline keeps in step with the peer that runs there
    dashboard: bool = False  # the page beside it
    metrics: tuple[str, int] | None = None  # address and port at which Prometheus asks
    as_json: bool = False  # summary.json on stdout, and nothing else there
    verbose: bool = False  # the terms are shown as the manifest has them

    @classmethod
    def of(cls, out: Path, given: Mapping[str, Any], invite: str | None = None) -> Self:  # Any: as click gives them
        """Part the options that a command was given: those of ``join``, those that can be set anew, the job's own."""
        settings = [one.name for one in fields(Preferences)]
        return cls(
            out=out,
            invite=invite,
            join=cast(JoinOptions, {name: value for name, value in given.items() if name in OPTIONS}),
            preferences=Preferences(**{name: given[name] for name in settings}),
            **{name: value for name, value in given.items() if name not in (*OPTIONS, *settings)},
        )

    @property
    def waits_for_company(self) -> bool:
        """True where it trains only once the run has, or had, a second member."""
        return self.invite is None and not (self.join.get("alone") or self.join.get("require_peers"))
