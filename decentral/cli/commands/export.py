"""``export``: a model folder out of a run directory, or out of a packed one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    """Write the newest checkpoint's model as safetensors, as transformers opens it where it is one of theirs.

    A folder that was written with --packed is turned into a model by the same command: name it as DIRECTORY.

    \b
    $ decentral export decentral-run --to model
    $ decentral export decentral-run --to packed --packed
    $ decentral export packed --to model
    """
    from decentral.errors import UsageError
    from decentral.state.export import PACKED, config_of, export, unpack
    from decentral.tasks.byte_tokenizer import tokenizer_files

    if (directory / PACKED).is_file() and not packed:
        unpack(directory, to)
        click.echo(json.dumps({"packed": str(directory), "to": str(to)}) if as_json else f"{to}: {directory}, unpacked")
        return
    checkpoints = remember(context, directory) / "checkpoints"
    if not checkpoints.is_dir():
        raise UsageError(f"{directory}: not a run directory with checkpoints; name what was given to --out")
    beside = tokenizer_files if _reads_bytes(directory) else None
    checkpoint = export(checkpoints, to, beside, packed=packed)
    for name, why in checkpoint.passed_over:
        click.echo(f"warning: checkpoint {name} is damaged ({why}); an older one was used", err=True)
    if as_json:
        click.echo(json.dumps({"checkpoint": str(checkpoint.path), "to": str(to)}))
    else:
        opens = f"open it with decentral export {to} --to FOLDER" if packed else _how_to_open(to, config_of(checkpoint))
        click.echo(f"{to}: the model of {checkpoint.path.name}; {opens}")


def _reads_bytes(directory: Path) -> bool:
    """Whether the run trains our own language model, whose tokens are bytes."""
    from decentral.manifest import load_manifest

    manifest = directory / "run.toml"
    return manifest.exists() and load_manifest(manifest).model.task == "causal-lm"


def _how_to_open(to: Path, config: Mapping[str, Any] | None) -> str:
    """What fits the model that was trained."""
    if config is None:
        load = f'model.load_state_dict(safetensors.torch.load_file("{to / "model.safetensors"}"))'
        return f"build the model as your script does, then {load}"
    (kind, *_) = config.get("architectures") or ["AutoModelForCausalLM"]
    names = ["AutoModelForCausalLM" if kind.endswith("ForCausalLM") else kind]
    if (to / "tokenizer.json").exists():
        names.append("AutoTokenizer")
    return "open it with transformers: " + " and ".join(f'{name}.from_pretrained("{to}")' for name in names)
