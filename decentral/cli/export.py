"""``export``: a model folder out of a run directory, or out of a packed one."""

import json
from pathlib import Path

import click

from decentral.cli.options import as_json, remember


@click.command("export")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--to", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to make; must not exist."
)
@click.option("--packed", is_flag=True, help="For the way to another machine: five sixths of the bytes.")
@as_json
@click.pass_context
def export_command(context: click.Context, directory: Path, to: Path, packed: bool, as_json: bool) -> None:
    """Write the newest checkpoint's model as safetensors with its config, as transformers opens it.

    A folder that was written with --packed is turned into a model by the same command: name it as DIRECTORY.

    \b
    $ decentral export decentral-run --to model
    $ decentral export decentral-run --to packed --packed
    $ decentral export packed --to model
    """
    from decentral.errors import UsageError
    from decentral.state.export import PACKED, export, unpack

    if (directory / PACKED).is_file() and not packed:
        unpack(directory, to)
        click.echo(json.dumps({"packed": str(directory), "to": str(to)}) if as_json else f"{to}: {directory}, unpacked")
        return
    checkpoints = remember(context, directory) / "checkpoints"
    if not checkpoints.is_dir():
        raise UsageError(f"{directory}: not a run directory with checkpoints; name what was given to --out")
    checkpoint = export(checkpoints, to, packed=packed)
    for name, why in checkpoint.passed_over:
        click.echo(f"warning: checkpoint {name} is damaged ({why}); an older one was used", err=True)
    if as_json:
        click.echo(json.dumps({"checkpoint": str(checkpoint.path), "to": str(to)}))
    else:
        opens = f"decentral export {to} --to FOLDER" if packed else "AutoModelForCausalLM.from_pretrained"
        click.echo(f"{to}: the model of {checkpoint.path.name}; open it with {opens}")
