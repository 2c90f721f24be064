"""``follow``: the anchors of a run as files, without taking part in it."""

from pathlib import Path
from typing import Any

import click

from decentral.cli.options import CAPS, INVITE, WAYS, option_of_join, remember, with_admit, with_options
from decentral.cli.quantities import Size
from decentral.quantities import moment_in, time_left

DEFAULT = Path("decentral-follow")

_OPTIONS = with_options(
    click.option(
        "--out",
        "directory",
        type=click.Path(path_type=Path, file_okay=False),
        default=DEFAULT,
        show_default=True,
        help="Folder of the follower; anchors come into its folder anchors, and the same command goes on from there.",
    ),
    click.option(
        "--every",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="N",
        help="Write every N-th anchor; the first that comes and the last one always.",
    ),
    click.option(
        "--keep",
        type=click.IntRange(min=1),
        default=3,
        show_default=True,
        metavar="K",
        help="Keep the newest K anchors.",
    ),
    click.option(
        "--delta", "deltas", is_flag=True, help="Beside each anchor, write its exact difference from the one before."
    ),
    click.option(
        "--until-end/--once",
        default=True,
        show_default=True,
        help="Go on until the run is over, or end with the newest anchor.",
    ),
    *WAYS,
    click.option(
        "--join-timeout",
        "give_up_at",
        type=click.FloatRange(min=0, min_open=True),
        callback=lambda context, parameter, seconds: moment_in(seconds),
        metavar="S",
        help="Give up with exit code 20 when nobody answered within S s of the command's start.",
    ),
    option_of_join("keep_serving", is_flag=True),
    *CAPS,
    click.option(
        "--max-disk", type=Size(), metavar="SIZE", help="Refuse a model that takes more of the disk, such as 20GB."
    ),
    with_admit("The token that the run wants, where the invite has none."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout for each anchor."),
)


@click.command("follow")
@click.argument("invite", nargs=-1, required=True, type=INVITE, envvar="DECENTRAL_INVITE")
@_OPTIONS
@click.pass_context
def follow_command(context: click.Context, /, invite: tuple[str, ...], directory: Path, **options: Any) -> None:
    """Receive a run's anchors as safetensors, for evaluation or serving, and contribute nothing.

    It needs no data and no script. It is no member of the run: nobody waits for it. The words of decentral invite
    --words do instead of an invite, and so do -, @FILE and DECENTRAL_INVITE, as with join.

    \b
    $ decentral follow INVITE --every 10 --keep 3
    """
    from decentral.cli.follow_job import FollowOptions, run_follow
    from decentral.cli.invite import invite_of
    from decentral.cli.preflight import check_place
    from decentral.swarm.admission import check_token
    from decentral.swarm.invite import Invite, whole_invite
    from decentral.transport.base import check_listen

    admit = options.pop("admit")
    if admit is not None:
        check_token(admit)

    if options["listen"]:
        check_listen(options["listen"])
    seconds = time_left(options["give_up_at"])
    line, options["relays"] = invite_of(invite, options["relays"], lan=options["lan"], seconds=seconds)
    line = whole_invite(line, directory, admit)
    Invite.parse(line)  # before anything is made or started
    check_place(remember(context, directory))
    context.exit(run_follow(line, FollowOptions(out=directory, **options)))
