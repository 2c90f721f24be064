"""``export``, ``generate``, ``evaluate``: the model that a run has made so far, as a folder and to be looked at."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decentral.cli.options import as_json, remember
from decentral.errors import DataError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from decentral.tasks.trained_model import TrainedModel

_HARMLESS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
_directory = click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
_tokenizer = click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Folder with the tokenizer, for a run of a script's own transformers model.",
)
_base = click.option(
    "--base",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Folder of the base model, where adapters were trained; the one that they name when not given.",
)


@click.command("generate")
@_directory
@click.option("--prompt", required=True, help="What the model goes on from.")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=200, show_default=True, help="How many it adds.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 10),
    default=0.8,
    show_default=True,
    help="0 takes the likeliest token each time; higher ones surprise more.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of what is drawn.")
@_tokenizer
@_base
@as_json
@click.pass_context
def generate_command(
    context: click.Context,
    directory: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    tokenizer: Path | None,
    base: Path | None,
    as_json: bool,
) -> None:
    """Have a run's model go on with a text. It is the newest checkpoint's, or that of a model folder.

    DIRECTORY is what --out of the run was, or what export wrote. A peer may run there meanwhile.

    \b
    $ decentral generate decentral-run --prompt "def main("
    """
    import torch

    from decentral.tasks.evaluate import continue_text
    from decentral.tasks.trained_model import open_trained

    remember(context, directory)
    trained = open_trained(directory, tokenizer, base)
    prompt_T = _tokens(trained, prompt)
    drawn: list[int] = []
    tell = (lambda text: None) if as_json else _make_printer()
    tell(prompt)
    for token in continue_text(
        trained.module,
        prompt_T,
        num_tokens=tokens,
        context=trained.context,
        temperature=temperature,
        generator=torch.Generator().manual_seed(seed),
    ):
        drawn.append(token)
        tell(prompt + trained.tokenizer.text_of(drawn))
    text = trained.tokenizer.text_of(drawn)
    if as_json:
        click.echo(json.dumps({"model": trained.source, "prompt": prompt, "text": text, "tokens": len(drawn)}))
    else:
        tell(prompt + text + "\n")


def _tokens(trained: TrainedModel, prompt: str) -> Tensor:
    import torch

    written = prompt.encode()
    token_T = trained.tokenizer.tokens_of(torch.tensor(list(written), dtype=torch.uint8))
    if not token_T.numel():
        raise UsageError("--prompt: an empty text has no token to go on from; give it a word at least")
    device = next(trained.module.parameters()).device
    return token_T.to(device)


def _make_printer() -> Callable[[str], None]:
    """Prints what a growing text has more than before; a character that is not whole yet is waited for.

    Control characters are shown as signs: a model may say what a terminal would obey.
    """
    shown = ""

    def tell(text: str) -> None:
        nonlocal shown
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}").translate(_HARMLESS)
        if whole.startswith(shown):
            click.echo(whole[len(shown) :], nl=False)
            shown = whole

    return tell


@click.command("evaluate")
@_directory
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Text: a file or a folder. The standard library's source when not given, where the run trains on it.",
)
@click.option("--all", "whole", is_flag=True, help="All of the text, not its held-out end: for text nobody trained on.")
@_tokenizer
@_base
@as_json
@click.pass_context
def evaluate_command(
    context: click.Context,
    directory: Path,
    data: Path | None,
    whole: bool,
    tokenizer: Path | None,
    base: Path | None,
    as_json: bool,
) -> None:
    """Tell how well a run's model foretells a text. It is the newest checkpoint's, or that of a model
    folder.

    It is the anchor that is evaluated, the model all peers share. What is held out is the end of the text, as large a
    part as the run keeps from training.

    \b
    $ decentral evaluate decentral-run
    """
    from decentral.tasks.evaluate import evaluate_text
    from decentral.tasks.trained_model import open_trained

    remember(context, directory)
    trained = open_trained(directory, tokenizer, base)
    text_N, source = _text(trained, data, whole)
    found = evaluate_text(trained, text_N)
    if as_json:
        click.echo(json.dumps({"model": trained.source, "text": source, **asdict(found)}))
        return
    click.echo(f"{found.bits_per_byte:.3f} bits per byte, {found.nats_per_token:.3f} nats per token")
    click.echo(f"of {trained.source}, on {found.num_tokens:,} tokens all over {source}")


def _text(trained: TrainedModel, data: Path | None, whole: bool) -> tuple[Tensor, str]:
    """Return the text to evaluate on, uint8 (N,), and its name."""
    import torch

    from decentral.tasks.corpus import load_corpus

    terms: Any = None if trained.manifest is None else trained.manifest.data
    if data is None and terms is not None and terms.corpus != "stdlib":
        raise DataError(f'the run trains on "{terms.corpus}": name this peer\'s text, or any other, with --data')
    held_out = 0.05 if terms is None else terms.held_out
    corpus = load_corpus(data, held_out=held_out)
    if whole:
        return torch.cat([corpus.train, corpus.held_out]), corpus.source
    return corpus.held_out, f"the last {100 * held_out:g} % of {corpus.source}"


@click.command("export")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--to", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to make; must not exist."
)
@click.option("--packed", is_flag=True, help="For the way to another machine: five sixths of the bytes.")
@as_json
@click.pass_context
def export_command(context: click.Context, directory: Path, to: Path, packed: bool, as_json: bool) -> None:
    """Write the newest checkpoint's model as safetensors. Transformers opens it where it is one of theirs.

    A folder that was written with --packed is turned into a model by the same command: name it as DIRECTORY.

    \b
    $ decentral export decentral-run --to model
    $ decentral export decentral-run --to packed --packed
    $ decentral export packed --to model
    """
    from decentral.cli.progress import Countdown
    from decentral.errors import UsageError
    from decentral.state.export import PACKED, config_of, export, is_of_adapters, unpack
    from decentral.tasks.corpus import tokenizer_files

    if (directory / PACKED).is_file() and not packed:
        with Countdown(sys.stderr) as on_share:
            unpack(directory, to, on_share)
        click.echo(json.dumps({"packed": str(directory), "to": str(to)}) if as_json else f"{to}: {directory}, unpacked")
        return
    checkpoints = remember(context, directory) / "checkpoints"
    if not checkpoints.is_dir():
        raise UsageError(f"{directory}: not a run directory with checkpoints; name what was given to --out")
    beside = tokenizer_files if _reads_bytes(directory) else None
    with Countdown(sys.stderr) as on_share:
        checkpoint = export(checkpoints, to, beside, packed=packed, on_share=on_share)
    for name, why in checkpoint.passed_over:
        click.echo(f"warning: checkpoint {name} is damaged ({why}); an older one was used", err=True)
    if as_json:
        click.echo(json.dumps({"checkpoint": str(checkpoint.path), "to": str(to)}))
    else:
        opens = _how_to_open(to, config_of(checkpoint))
        if packed:
            opens = f"open it with decentral export {shlex.quote(str(to))} --to FOLDER"
        elif is_of_adapters(checkpoint):
            opens = f'open it with peft, on the base that it was trained on: PeftModel.from_pretrained(base, "{to}")'
        click.echo(f"{to}: the model of {checkpoint.path.name}; {opens}")


def _reads_bytes(directory: Path) -> bool:
    """Tell whether the run trains our own language model, whose tokens are bytes."""
    from decentral.manifest import load_manifest

    manifest = directory / "run.toml"
    return manifest.exists() and load_manifest(manifest).model.task == "causal-lm"


def _how_to_open(to: Path, config: Mapping[str, Any] | None) -> str:
    """Say how the model that was trained is opened."""
    if config is None:
        load = f'model.load_state_dict(safetensors.torch.load_file("{to / "model.safetensors"}"))'
        return f"build the model as your script does, then {load}"
    (kind, *_) = config.get("architectures") or ["AutoModelForCausalLM"]
    names = ["AutoModelForCausalLM" if kind.endswith("ForCausalLM") else kind]
    if (to / "tokenizer.json").exists():
        names.append("AutoTokenizer")
    return "open it with transformers: " + " and ".join(f'{name}.from_pretrained("{to}")' for name in names)
