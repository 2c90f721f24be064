from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from decentral.tasks.corpus import alphabet, tokenizer_files
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig

CONFIG = {"vocab_size": 256, "max_position_embeddings": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported model with its tokenizer."""
    model = build_language_model(LanguageModelConfig(hidden=16, layers=1, heads=2, context=64), seed=0)
    model.save_pretrained(tmp_path)
    for name, text in tokenizer_files(CONFIG).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "text", ["def f(x):\r\n\treturn  x ", "", " <s> </s> [UNK] <|endoftext|>", "wörld 🦊 \x00\x7f", "a'll b's  \n\n c"]
)
def test_the_ids_of_a_text_are_its_bytes_and_lead_back_to_it(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_every_byte_is_a_token_with_its_own_number(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert len(tokenizer) == 256
    assert tokenizer.convert_tokens_to_ids(alphabet()) == list(range(256))
    assert tokenizer.model_max_length == 64


def test_a_few_bytes_are_generated_with_what_the_folder_has(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    given = tokenizer("def ", return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**given, max_new_tokens=6, do_sample=False)[0]
    assert ids[:4].tolist() == list(b"def ")
    assert len(ids) == 10
    assert tokenizer.decode(ids).startswith("def ")


def test_a_model_whose_tokens_are_no_bytes_gets_no_tokenizer() -> None:
    assert tokenizer_files({"vocab_size": 32000}) == {}
    assert tokenizer_files({}) == {}
