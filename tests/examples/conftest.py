"""A model folder of transformers, random and tiny: what people download, without a download."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decentral.tasks.corpus import tokenizer_files
from decentral.tasks.sizing import VOCAB


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """A Llama over bytes, 115,008 parameters, with its tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=64, **sizes))
    folder = tmp_path / "base"
    model.save_pretrained(folder)
    for name, text in tokenizer_files(model.config.to_dict()).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder
