"""``decentral simulate``: a run on given links and machines, by its messages or by its rounds."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decentral.cli.options import as_json
from decentral.cli.progress import Countdown
from decentral.cli.quantities import Duration, ModelSize, Rate
from decentral.errors import UsageError

if TYPE_CHECKING:
    from decentral.simulate.simulation import By

ROUNDS = 20
LEARNING_ROUNDS = 150  # after 20 a sparse swarm has sent a third of the model, and the lone peer has learnt it
MOST_PEERS = 1024  # of one epoch
MOST_STAGES = 4  # of one replica, as `decentral.pipeline.cut` has it, which loads slowly
MANY = 16  # peers from which on messages take half a minute and more
PROFILES = ("lab", "home", "spot", "storm", "cliff", "even")


@click.command("simulate")
@click.argument("manifest", metavar="RUN.toml", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--peers", default=4, show_default=True, type=click.IntRange(1, MOST_PEERS), help="Simulated peers.")
@click.option("--profile", type=click.Choice(PROFILES), help="Links and machines; home, with --link even.")
@click.option("--link", type=Rate(), help="Every peer's line, each way, as 20mbit, instead of the profile's lines.")
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same run, to the last event.")
@click.option(
    "--rounds", type=click.IntRange(1), help=f"Outer steps to simulate; {ROUNDS}, with --learn {LEARNING_ROUNDS}."
)
@click.option(
    "--step-seconds", type=click.FloatRange(min=0, min_open=True), help="Of one inner step on the median peer; 1."
)
@click.option("--step-time", type=Duration(), help="The same with its unit, as 0.4s.")
@click.option("--parameters", type=ModelSize(), help="Of the model, as 30M; taken from the manifest when it says so.")
@click.option(
    "--by",
    type=click.Choice(["messages", "rounds"]),
    help=f"Run the protocol, or reckon its rounds: seconds for any swarm. Rounds from {MANY} peers on, if they can be.",
)
@click.option(
    "--share",
    type=click.IntRange(2, MOST_STAGES),
    help="Reckon a replica of so many equal machines instead, in one home or each behind --link. "
    "--step-time is of the whole model on one of them.",
)
@click.option("--learn", is_flag=True, help="Train a small model; its loss, and what a peer alone reaches as long.")
@as_json
@click.pass_context
def simulate_command(
    context: click.Context,
    manifest: Path,
    peers: int,
    profile: str | None,
    link: float | None,
    seed: int,
    rounds: int | None,
    step_seconds: float | None,
    step_time: float | None,
    parameters: int | None,
    by: By | None,
    share: int | None,
    learn: bool,
    as_json: bool,
) -> None:
    """Run the real protocol on simulated machines. Hours take seconds; or reckon what it would take.

    \b
    $ decentral simulate run.toml --peers 8 --profile home
    $ decentral simulate run.toml --peers 8 --profile storm --seed 7 --json
    $ decentral simulate run.toml --peers 8 --profile spot --learn
    $ decentral simulate run.toml --peers 8 --link 20mbit --step-time 0.4s
    $ decentral simulate run.toml --peers 256 --by rounds
    $ decentral simulate run.toml --share 3 --link 20mbit --step-time 2s
    """
    _check_installed()
    from decentral.manifest import check_methods, load_manifest
    from decentral.simulate.by_rounds.forecast import is_by_rounds
    from decentral.simulate.simulation import forecast, forecast_replica

    if step_seconds is not None and step_time is not None:
        raise UsageError("--step-seconds and --step-time are one and the same; give one of them")
    terms = load_manifest(manifest)
    check_methods(terms)
    if share is not None:
        _refuse_beside_share(context)
        replica = forecast_replica(terms, share, link=link, step_seconds=step_seconds or step_time or 1.0)
        click.echo(json.dumps(replica) if as_json else _in_words(replica))
        return
    profile = profile or ("home" if link is None else "even")
    if by is None:
        by = "rounds" if peers >= MANY and not learn and is_by_rounds(terms, profile) else "messages"
    with Countdown(sys.stderr) as countdown:
        found = forecast(
            terms,
            peers=peers,
            profile=profile,
            link=link,
            seed=seed,
            rounds=rounds or (LEARNING_ROUNDS if learn else ROUNDS),
            step_seconds=step_seconds or step_time or 1.0,
            parameters=parameters,
            learn=learn,
            by=by,
            on_progress=countdown,
        )
    if as_json:
        click.echo(json.dumps(found))
    else:
        _print_forecast(found, profile, peers)
    if found.get("problems"):
        raise click.exceptions.Exit(1)


def _check_installed() -> None:
    """Raise UsageError where the package of the extra is missing."""
    if importlib.util.find_spec("trio") is None:
        from decentral.plugins import to_install  # 0.03 s, which only those pay who need it

        raise UsageError(f"simulated swarms need trio; {to_install('simulate')}")


def _refuse_beside_share(context: click.Context) -> None:
    """Raise UsageError for an option of a simulated swarm."""
    for name in ("peers", "profile", "seed", "rounds", "parameters", "by", "learn"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(f"--share reckons one replica, without a swarm; leave --{name} out")


def _in_words(found: dict[str, Any]) -> str:
    parts = ", ".join(str(first) if stop - first == 1 else f"{first} to {stop - 1}" for first, stop in found["parts"])
    crosses = "as it is" if found["rounding"] == "exact" else f"in {found['rounding']}"
    return (
        f"{found['share']} machines as one replica: {found['tokens_per_second']:,.0f} tokens/s, a step of "
        f"{found['micro_batches']} micro-batches in {found['step_seconds']:.2f} s; one that holds the model: "
        f"{found['whole_tokens_per_second']:,.0f} tokens/s, {found['whole_step_seconds']:.2f} s\n"
        f"each works {found['utilisation']:.0%} of the time, trains fragments {parts}, sends what crosses {crosses}, "
        f"takes {found['memory_per_machine'] / 1e9:.1f} GB beside activations"
    )


def _fewer(found: dict[str, object]) -> str:
    """A round has twice its training and the longest wait; what takes longer is not simulated to its end."""
    return f"only {found['rounds']} of {found['asked']} rounds, which are too slow to make more in their time,"


def _print_forecast(found: dict[str, object], profile: str, peers: int) -> None:
    reckoned = ", reckoned by rounds; --by messages runs the protocol" if found["by"] == "rounds" else ""
    made = f"{found['rounds']} rounds" if found["rounds"] == found["asked"] else _fewer(found)
    click.echo(f"{made} of {peers} peers ({profile}) in {found['seconds']:,.0f} simulated seconds{reckoned}")
    counts = ("pairs", "unpaired") if "pairs" in found else ("commits", "contributors")
    for name in (
        *counts,
        "seconds_per_round",
        "utilisation",
        "bytes_per_peer",
        "join_seconds",
        "divergence",
        "hangs",
        "trace_hash",
    ):
        if name in found:
            click.echo(f"{name:16} {found[name]}")
    if "unmoved" in found:
        click.echo(f"{'unmoved':16} {found['unmoved']} rounds moved nothing: {found['why_unmoved']}")
    if "loss" in found:
        alone = (
            f"{found['loss_alone']} for a median peer alone as long, which makes {found['steps_alone']:,} inner steps"
        )
        click.echo(f"{'loss':16} {found['loss']} of a small model, after {found['steps']:,} per peer; {alone}")
    for problem in found.get("problems", ()):  # type: ignore[attr-defined]
        click.echo(f"problem          {problem}")
