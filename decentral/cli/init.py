"""``decentral init``: write the terms of a run, of a preset that is named or of the one that fits a line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from decentral.cli.options import as_json, presets_that_begin
from decentral.cli.quantities import Duration, ModelSize, Rate
from decentral.errors import UsageError

DEFAULT_FILE = Path("run.toml")  # with --link, where nothing else has to be said
DEFAULT_PEERS = 8


@click.command("init")
@click.argument("file", metavar="RUN.toml", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--preset",
    shell_complete=presets_that_begin,
    help="Which algorithm's defaults to write, another package's too; unless given, what suits the line and the model.",
)
@click.option(
    "--link", type=Rate(), help="Everybody's line, each way, as 20mbit: choose preset and inner steps for it."
)
@click.option("--peers", type=click.IntRange(2, 64), help=f"How many train; {DEFAULT_PEERS} unless given.")
@click.option(
    "--step-time",
    type=Duration(),
    help="With --link: of an inner step, as 0.4s; measured on this machine unless given.",
)
@click.option("--model-size", type=ModelSize(), help="Of the language model, or of your own, in parameters, as 30M.")
@click.option(
    "--task",
    type=click.Choice(["causal-lm", "custom"]),
    help="Whose model: a small language model, which start and join train, or custom, your own script's.",
)
@click.option("--experts", type=click.IntRange(min=2), metavar="E", help="Experts per block: a mixture, for causal-lm.")
@click.option("--name", help="Name of the run, for people.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the first model and of the data's order.")
@click.option("--rounds", type=click.IntRange(min=1), help="Outer steps after which the run is over.")
@click.option("--inner-steps", type=click.IntRange(min=1), metavar="H", help="Inner steps between two rounds.")
@click.option("--inner-rate", type=click.FloatRange(min=0, min_open=True), help="Learning rate of the inner steps.")
@click.option("--decay", type=click.FloatRange(min=0), help="Weight decay of the inner steps.")
@click.option("--clip", type=click.FloatRange(min=0, min_open=True), help="Largest gradient norm of the inner steps.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Time after which the run is over.")
@click.option("--corpus", help="What is trained on: a label for --data, or for what each peer brings.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Text that all peers train on, a file or a folder: the terms name it and its digest.",
)
@click.option("--share-text", is_flag=True, help="With --data: peers give that text to who joins without it.")
@click.option(
    "--text-url", metavar="URL", help="With --data: where that text is, too, by https, for who joins without it."
)
@click.option("--overlap", type=click.IntRange(min=0), metavar="TAU", help="Inner steps that hide a round.")
@click.option(
    "--stages",
    type=click.IntRange(2, 1024),
    metavar="N",
    help="Cut the model into so many neighbouring stages that take turns, so that small machines can train some.",
)
@click.option("--min-peers", type=click.IntRange(min=1), help="Members below which nothing is committed.")
@click.option("--compressor", help="What is sent, such as 'topk(k=64, chunk=4096) >> signmag2'.")
@click.option("--force", is_flag=True, help="Write over an existing file.")
@as_json
@click.pass_context
def init_command(
    context: click.Context,
    /,
    file: Path | None,
    preset: str | None,
    link: float | None,
    peers: int | None,
    step_time: float | None,
    model_size: int | None,
    force: bool,
    data: Path | None,
    share_text: bool,
    text_url: str | None,
    as_json: bool,
    **overrides: Any,
) -> None:
    """Write the terms that all peers of a run agree on. Each key of the manifest has a comment.

    \b
    $ decentral init run.toml --preset sparseloco
    $ decentral init lines.toml --link 20mbit --peers 8 --model-size 30M --step-time 0.4s
    """
    from decentral.cli.preflight import write_text
    from decentral.cli.terms import model_sizes, next_step, of_loss, of_rate, scale_assumed, terms_of, why_default
    from decentral.manifest.presets import default_preset
    from decentral.optimizers import presets
    from decentral.trial.check import check_learns

    file = _place(context, file, force, linked=link is not None)
    overrides = _with_data(overrides, data, text_url, is_shared=share_text)
    sizes = model_sizes(model_size, overrides)
    if link is not None and overrides["stages"] is not None:
        raise UsageError("--stages with --link: inner steps that suit the line suit no stages; leave one of them out")
    if link is None:
        _refuse({"--step-time": step_time})
        scale, asked = scale_assumed(overrides, sizes, model_size, peers), preset
        preset = asked or default_preset(scale)
        is_told = model_size is not None or overrides["task"] != "custom"
        why = "" if asked else why_default(preset, scale, is_told=is_told)
        manifest, found = terms_of(preset, overrides, sizes, scale=scale), None
    else:
        from decentral.cli.fitting import Wish, fit_terms

        wish = Wish(
            rate=link, peers=peers or DEFAULT_PEERS, step_seconds=step_time, model_size=model_size, preset=preset
        )
        found = fit_terms(wish, overrides, sizes)
        manifest, preset, scale, why = found.manifest, found.fit.preset, found.given.scale, found.sentences()
    check_learns(manifest)
    write_text(file, manifest.to_toml())
    if as_json:
        told = {"file": str(file), "run": manifest.run.name, "run_id": manifest.run_id, "preset": preset}
        click.echo(json.dumps(told | ({} if found is None else found.to_dict())))
        return
    rounds = manifest.run.rounds if found is None else found.fit.rounds
    rate = of_rate(preset, manifest, rounds, scale)
    for said in filter(None, (why, rate, of_loss(manifest), presets()[preset].behind)):
        click.echo(said)
    click.echo(f"{file}: run {manifest.run.name}, {preset}; {next_step(manifest, file, data)}")


def _place(context: click.Context, file: Path | None, force: bool, *, linked: bool) -> Path:
    """Where the terms go. Raises UsageError where something is that was not to be written over."""
    if file is None and not linked:
        raise click.MissingParameter(ctx=context, param=context.command.params[0])
    file = file or DEFAULT_FILE
    if file.exists() and not force:
        raise UsageError(f"{file} exists; --force writes over it, or name another file")
    return file


def _with_data(
    overrides: dict[str, Any],  # Any: values of every option
    data: Path | None,
    url: str | None,
    *,
    is_shared: bool,
) -> dict[str, Any]:
    """With the text's name and digest, and how it travels. Raises UsageError, DataError."""
    if data is None and (is_shared or url is not None):
        raise UsageError("--share-text and --text-url are about your text; name it with --data")
    if data is None:
        return overrides
    from decentral.cli.terms import with_text
    from decentral.tasks.evaluate import survey

    if overrides["task"] == "custom":
        raise UsageError("--data is text for causal-lm; with --task custom a script reads its own, name it by --corpus")
    text = survey(data)
    click.echo(f"data    {text}", err=True)
    return with_text(overrides, text, url, is_shared=is_shared)


def _refuse(given: Mapping[str, object]) -> None:
    """UsageError for what says nothing without a line."""
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option} is for choosing terms by a line; add --link, as 20mbit")
