"""A tokenizer for models over bytes, as files that ``transformers.AutoTokenizer`` opens: the ids are the bytes.

Training reads bytes and needs none (tasks/corpus.py). Who opens an exported model does: byte-level BPE without a merge
is exactly that, so no network and no code of ours is needed. Its alphabet has a printable character for each byte.

Source of the alphabet: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (encoder.py).
"""

import json
from collections.abc import Mapping
from typing import Any

NUM_BYTES = 256
_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))


def tokenizer_files(config: Mapping[str, Any]) -> dict[str, str]:
    """File names and their texts for a transformers configuration; none for a model whose tokens are not bytes."""
    if config.get("vocab_size") != NUM_BYTES:
        return {}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.get("max_position_embeddings"),
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": _text(_tokenizer()), "tokenizer_config.json": _text(about)}


def alphabet() -> list[str]:
    """The character that stands for each byte: itself where it is printable, else the next one from 256 on."""
    others = (byte for byte in range(NUM_BYTES) if byte not in _PRINTABLE)
    moved = {byte: chr(NUM_BYTES + index) for index, byte in enumerate(others)}
    return [moved.get(byte, chr(byte)) for byte in range(NUM_BYTES)]


def _tokenizer() -> dict[str, Any]:
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocab = {character: byte for byte, character in enumerate(alphabet())}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": by_byte,
        "decoder": by_byte,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"
