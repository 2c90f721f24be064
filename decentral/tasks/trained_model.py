"""A causal language model to be looked at: the anchor of a run directory's newest checkpoint, or a model folder.

Nothing is fetched and no code of the folder runs: weights come from safetensors. The built-in model is built here, any
other by transformers.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from decentral.errors import ConfigError, DiskError, UsageError
from decentral.manifest import Manifest, load_manifest
from decentral.plugins import to_install
from decentral.state.checkpoint import ADAPTER, ADAPTER_CONFIG, Checkpoint, load_newest
from decentral.state.export import CONFIG, MODEL, PACKED, config_of, export, is_of_adapters, whole_model
from decentral.tasks.corpus import byte_tokenizer
from decentral.tasks.language_model import LanguageModel, put_in
from decentral.tasks.sizing import built_in

CHECKPOINTS, TERMS = "checkpoints", "run.toml"


class Tokenizer(Protocol):
    """Text, as UTF-8, to tokens and back."""

    def tokens_of(self, utf8_N: Tensor) -> Tensor:
        """Tokens (T,) of bytes, uint8 (N,)."""
        ...

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is no text is replaced."""
        ...

    def nbytes_of(self, tokens: Sequence[int]) -> int:
        """Bytes of UTF-8 that they stand for."""
        ...


class Bytes:
    """The tokens of the built-in model: the bytes."""

    def tokens_of(self, utf8_N: Tensor) -> Tensor:
        """Return the bytes themselves."""
        return utf8_N.long()

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text; bytes that are none become a sign that says so."""
        return bytes(tokens).decode(errors="replace")

    def nbytes_of(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens, which is that of bytes."""
        return len(tokens)


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model in evaluation mode, on the accelerator where there is one."""

    module: Any  # transformers' causal interface; it ships no types
    tokenizer: Tokenizer
    context: int  # tokens that it sees at once
    source: str  # for the screen
    manifest: Manifest | None  # of the run that it is of; None: of a folder that does not say


def open_trained(directory: Path, tokenizer: Path | None = None, base: Path | None = None) -> TrainedModel:
    """Open what is in ``directory``; ``tokenizer``: a folder with one, where the model's tokens are not bytes.

    ``base``: the folder of the base model, where what was trained are adapters; else the one that they name.

    Raises UsageError for a folder with no such model in it, DiskError for damaged files.
    """
    if (directory / CHECKPOINTS).is_dir():
        return _of_run(directory, tokenizer, base)
    if (directory / PACKED).is_file():
        raise UsageError(
            f"{directory} is packed; unpack it with decentral export {shlex.quote(str(directory))} --to FOLDER"
        )
    if (directory / MODEL).is_file() and (directory / CONFIG).is_file():
        return _of_folder(directory, tokenizer)
    if holds_adapters(directory):
        return _on_base(*adapters_of_folder(directory, base), tokenizer, str(directory))
    if (directory / MODEL).is_file():
        raise UsageError(f"{directory} has tensors and no {CONFIG}: only the script that built the model opens it")
    raise UsageError(f"{directory}: neither a run directory with checkpoints nor a model folder; name one of them")


def _of_run(directory: Path, tokenizer: Path | None, base: Path | None) -> TrainedModel:
    checkpoint = load_newest(directory / CHECKPOINTS)
    if checkpoint is None:
        raise DiskError(f"no checkpoint in {directory / CHECKPOINTS}; train until one is written")
    if is_of_adapters(checkpoint):
        source = f"{directory}, {checkpoint.path.name}"
        return _on_base(*adapters_of_run(directory / CHECKPOINTS, base), tokenizer, source)
    manifest = load_manifest(directory / TERMS) if (directory / TERMS).exists() else None
    module = _built(checkpoint, directory)
    reads_bytes = manifest is not None and manifest.model.task == "causal-lm"
    if tokenizer is None and not reads_bytes:
        raise UsageError(f"{directory} holds a script's own model and no tokenizer; name its folder with --tokenizer")
    reads = Bytes() if tokenizer is None else _tokenizer_of(tokenizer)
    return _ready(module, reads, f"{directory}, {checkpoint.path.name}", manifest)


def _on_base(module: Any, base: Path, tokenizer: Path | None, source: str) -> TrainedModel:  # Any: as in TrainedModel
    """Return a base with its adapters, with the base's tokenizer where none is named."""
    return _ready(module, _tokenizer_of(base if tokenizer is None else tokenizer), f"{source}, on {base}", None)


def _built(checkpoint: Checkpoint, directory: Path) -> Any:  # Any: as in TrainedModel
    config = config_of(checkpoint)
    if config is None or not _is_causal(config):
        raise UsageError(
            f"{directory} holds a model that only its script can build, and no causal language model of transformers; "
            f"decentral export {shlex.quote(str(directory))} --to FOLDER gives its tensors"
        )
    with torch.random.fork_rng(devices=[]):  # weights are drawn, and overwritten
        module = _make_empty(config, directory)
    return _fill(module, whole_model(checkpoint, directory), checkpoint.path)


def _make_empty(config: dict[str, Any], directory: Path) -> Any:  # Any: as in TrainedModel
    """Build what a configuration describes, with weights that say nothing."""
    own = built_in(config)
    if own is not None:
        return LanguageModel(own)
    check_transformers(directory)
    from transformers import AutoConfig, AutoModelForCausalLM

    described = AutoConfig.for_model(config.pop("model_type"), **config)
    return AutoModelForCausalLM.from_config(described, dtype=torch.float32)


def _fill(module: Any, tensors: Mapping[str, Tensor], path: Path) -> Any:  # Any: as in TrainedModel
    """Give a model the weights that were kept in ``path``. DiskError where they are another's."""
    try:
        put_in(module, tensors)
    except ConfigError as error:
        raise DiskError(f"{path} does not fit its own configuration: {error}") from error
    return module


def check_transformers(holder: Path) -> None:
    """UsageError where transformers, which takes what ``holder`` holds to be opened, is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(f"{holder} takes transformers to open; {to_install('transformers')}")


def _is_causal(config: dict[str, Any]) -> bool:
    return any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in config.get("architectures") or ())


def _of_folder(directory: Path, tokenizer: Path | None) -> TrainedModel:
    own = built_in(_json_of(directory / CONFIG))
    if own is None:
        check_transformers(directory)
    reads = _tokenizer_of(directory if tokenizer is None else tokenizer)
    if own is None:
        return _ready(_of_transformers(directory), reads, str(directory), None)
    try:
        tensors = load_file(directory / MODEL)
    except (OSError, SafetensorError) as error:
        raise DiskError(f"{directory / MODEL} cannot be read ({error}); export it again") from error
    with torch.random.fork_rng(devices=[]):  # as above
        module = LanguageModel(own)
    return _ready(_fill(module, tensors, directory / MODEL), reads, str(directory), None)


def _json_of(path: Path) -> dict[str, Any]:  # Any: JSON
    """Read an object from a file; empty where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_transformers(directory: Path) -> Any:  # Any: as in TrainedModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
    except (ValueError, KeyError, OSError) as error:
        why = str(error).split("\n", 1)[0]
        raise UsageError(f"{directory} is no causal language model that transformers opens: {why}") from error


def _tokenizer_of(folder: Path) -> Tokenizer:
    """Open a folder's tokenizer; that of bytes, which ``export`` writes, is known by its file."""
    if _json_of(folder / "tokenizer.json") == byte_tokenizer():
        return Bytes()
    check_transformers(folder)
    from transformers import AutoTokenizer

    try:
        return _OfTransformers(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (ValueError, KeyError, OSError) as error:
        raise UsageError(f"{folder} holds no tokenizer; name a folder that does with --tokenizer") from error


@dataclass(frozen=True, slots=True)
class _OfTransformers:
    given: Any

    def tokens_of(self, utf8_N: Tensor) -> Tensor:
        text = bytes(utf8_N.tolist()).decode(errors="replace")
        ids = self.given(text, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64, device="cpu")

    def text_of(self, tokens: Sequence[int]) -> str:
        return str(self.given.decode(tokens))

    def nbytes_of(self, tokens: Sequence[int]) -> int:
        return len(self.text_of(tokens).encode())


def _ready(module: Any, tokenizer: Tokenizer, source: str, manifest: Manifest | None) -> TrainedModel:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module.to(accelerator or "cpu").eval()
    return TrainedModel(module, tokenizer, int(module.config.max_position_embeddings), source, manifest)


# ---- adapters on their base, as one model ----
#
# The base is from its folder, the adapters from the run. peft puts them together; they are then added to the base's
# weights, so that what follows sees a usual model.

_BASE_KEY = "base_model_name_or_path"  # in peft's configuration: where the base was when it was trained


def adapters_of_run(checkpoints: Path, base: Path | None) -> tuple[Any, Path]:
    """Return the newest checkpoint's adapters on their base, and the base's folder. Raises UsageError, DiskError."""
    with tempfile.TemporaryDirectory(prefix="decentral-") as folder:
        adapters = Path(folder) / "adapters"
        export(checkpoints, adapters)
        return adapters_of_folder(adapters, base)


def adapters_of_folder(adapters: Path, base: Path | None) -> tuple[Any, Path]:
    """Return the adapters of a folder, as peft saves them, on their base, and the base's folder."""
    if importlib.util.find_spec("peft") is None:
        raise UsageError(f"{adapters} holds adapters, which take peft to open; {to_install('lora')}")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = base or _base_of(adapters)
    if place is None:
        raise UsageError("what was trained are adapters, and their base is not in the folder: name its own with --base")
    try:
        module = AutoModelForCausalLM.from_pretrained(place, local_files_only=True, use_safetensors=True)
        return PeftModel.from_pretrained(module, str(adapters), local_files_only=True).merge_and_unload(), place
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        why = str(error).strip().split("\n", 1)[0]
        raise UsageError(f"{place} is no base that these adapters fit: {why}; name another one with --base") from error


def holds_adapters(folder: Path) -> bool:
    """Tell whether ``folder`` is what peft saves, or ``decentral export`` of such a run."""
    return (folder / ADAPTER).is_file() and (folder / ADAPTER_CONFIG).is_file()


def _base_of(adapters: Path) -> Path | None:
    """Return where the base was, if that is a folder here; a name of a hub is fetched by nobody."""
    try:
        named = json.loads((adapters / ADAPTER_CONFIG).read_text(encoding="utf-8")).get(_BASE_KEY)
    except (OSError, ValueError, AttributeError) as error:
        raise DiskError(f"{adapters / ADAPTER_CONFIG} cannot be read ({type(error).__name__})") from error
    place = Path(named) if isinstance(named, str) and named else None
    return place if place is not None and (place / CONFIG).is_file() else None
