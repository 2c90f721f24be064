"""``export``: a model folder out of a run directory."""

import json
from pathlib import Path

import click

from decentral.cli.options import as_json, remember


@click.command("export")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--to", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to make; must not exist."
)
@as_json
@click.pass_context
def export_command(context: click.Context, directory: Path, to: Path, as_json: bool) -> None:
    """Write the newest checkpoint's model as safetensors with its config, as transformers opens it.

    \b
    $ decentral export decentral-run --to model
    """
    from decentral.errors import UsageError
    from decentral.state.export import export

    checkpoints = remember(context, directory) / "checkpoints"
    if not checkpoints.is_dir():
        raise UsageError(f"{directory}: not a run directory with checkpoints; name what was given to --out")
    checkpoint = export(checkpoints, to)
    for name, why in checkpoint.passed_over:
        click.echo(f"warning: checkpoint {name} is damaged ({why}); an older one was used", err=True)
    if as_json:
        click.echo(json.dumps({"checkpoint": str(checkpoint.path), "to": str(to)}))
    else:
        click.echo(f"{to}: the model of {checkpoint.path.name}; open it with AutoModelForCausalLM.from_pretrained")
