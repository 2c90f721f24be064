"""Texts that a run is trained on, and the tokenizer of bytes that an export has."""

import sysconfig
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from decentral.errors import DataError
from decentral.state.export import export
from decentral.tasks import corpus as corpus_module
from decentral.tasks.corpus import MIN_NBYTES, alphabet, load_corpus, tokenizer_files
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig
from tests.kit.exports import kept


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported model with its tokenizer."""
    kept(
        tmp_path / "run",
        build_language_model(LanguageModelConfig(hidden=16, layers=1, heads=2, context=64), seed=0),
        "causal-lm",
    )
    export(tmp_path / "run" / "checkpoints", tmp_path / "model", tokenizer_files)
    return tmp_path / "model"


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


def as_bytes(tensor):
    return bytes(tensor.tolist())


def test_the_standard_library_is_a_corpus_on_every_machine():
    corpus = load_corpus()
    assert 8_000_000 <= corpus.nbytes <= 16 * 2**20
    assert corpus.held_out.numel() == int(corpus.nbytes * 0.05)
    assert "standard library" in corpus.source
    again = load_corpus()
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.held_out, again.held_out)


def test_test_folders_are_read_when_the_rest_is_small(tmp_path, monkeypatch):
    for name, text in [
        ("a.py", b"a" * MIN_NBYTES),
        ("test/b.py", b"b" * 9),
        ("site-packages/c.py", b"c"),
        ("d.txt", b"d"),
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    corpus = load_corpus()
    assert as_bytes(torch.cat([corpus.train, corpus.held_out])) == b"a" * MIN_NBYTES + b"b" * 9
    monkeypatch.setattr(corpus_module, "STDLIB_WANTED_NBYTES", MIN_NBYTES)
    assert load_corpus().nbytes == MIN_NBYTES
    monkeypatch.setattr(corpus_module, "STDLIB_MAX_NBYTES", MIN_NBYTES + 4)
    monkeypatch.setattr(corpus_module, "STDLIB_WANTED_NBYTES", 2 * MIN_NBYTES)
    assert load_corpus().nbytes == MIN_NBYTES + 4


def test_a_python_without_source_asks_for_data(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"keeps no source in .*--data") as caught:
        load_corpus()
    assert "\n" not in str(caught.value)


def test_a_file_is_split_at_its_end_and_nothing_is_lost(tmp_path):
    text = bytes(n % 256 for n in range(MIN_NBYTES))
    (tmp_path / "text").write_bytes(text)
    corpus = load_corpus(tmp_path / "text", held_out=0.25)
    assert as_bytes(corpus.train) + as_bytes(corpus.held_out) == text
    assert corpus.held_out.numel() == MIN_NBYTES // 4
    assert corpus.train.dtype == torch.uint8


def test_a_folder_is_its_text_files_in_sorted_order(tmp_path):
    files = {
        "b.txt": b"b" * MIN_NBYTES,
        "a/z.txt": b"z",
        "a.txt": b"a",
        "a/binary": b"\0PNG",
        ".hidden": b"h",
        ".git/config": b"g",
        "__pycache__/x.pyc": b"p",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    (tmp_path / "link").symlink_to(tmp_path / "b.txt")
    corpus = load_corpus(str(tmp_path))
    assert as_bytes(torch.cat([corpus.train, corpus.held_out])) == b"z" + b"a" + b"b" * MIN_NBYTES


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("missing", "cannot be read .No such file"),
        ("small", "holds 5 bytes of text, at least"),
        ("empty", "holds 0 bytes"),
    ],
)
def test_what_is_no_corpus_is_one_line(tmp_path, name, match):
    (tmp_path / "small").write_bytes(b"short")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=match) as caught:
        load_corpus(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert "--data" in str(caught.value)


def test_a_corpus_larger_than_memory_allows_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**31)  # sparse
    with pytest.raises(DataError, match="name a part"):
        load_corpus(tmp_path / "huge")


@pytest.mark.parametrize("held_out", [0, -0.1, 0.6, float("nan")])
def test_a_held_out_fraction_must_make_sense(held_out):
    with pytest.raises(DataError, match="held_out"):
        load_corpus(held_out=held_out)
