"""What ``start`` and ``join`` have in common: how one peer takes part, whatever the run's terms are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from decentral.cli.metrics_port import with_metrics
from decentral.cli.options import DEFAULT_DIRECTORY, Decorator, cards_by_name
from decentral.cli.page import with_page
from decentral.cli.quantities import HoursOfDay, Rate, Share, Size
from decentral.preferences.preferences import LEAST_MEMORY
from decentral.swarm.patience import moment_in


def _installed(context: click.Context, parameter: click.Parameter, kind: str | None) -> str | None:
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
        callback=_installed,
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
