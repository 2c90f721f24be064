"""Bits per byte of a held-out text, and what is said of the text at ``--data``."""

import hashlib
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from decentral.errors import DataError
from decentral.manifest.terms import Data
from decentral.tasks import corpus as corpus_module
from decentral.tasks.corpus import MIN_NBYTES, load_corpus
from decentral.tasks.evaluate import Survey, bits_per_byte, check_agreed, held_out_windows, survey
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig

HELD_OUT = (torch.arange(3000) * 13 % 256).to(torch.uint8)


class Constant(torch.nn.Module):
    """Says the same probabilities whatever came before."""

    def __init__(self, probabilities):
        super().__init__()
        self.logits = torch.nn.Parameter(probabilities.log())

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, 256))


def test_knowing_nothing_is_eight_bits_per_byte():
    model = Constant(torch.full((256,), 1 / 256))
    assert bits_per_byte(model, HELD_OUT, context=32) == pytest.approx(8.0, abs=1e-5)


def test_a_known_distribution_gives_its_cross_entropy():
    probabilities = torch.full((256,), 0.5 / 255)
    probabilities[7] = 0.5
    held_out = torch.tensor([7, 7, 7, 9] * 100, dtype=torch.uint8)
    expected = 0.75 + 0.25 * math.log2(255 / 0.5)
    windows = bits_per_byte(Constant(probabilities), held_out, context=401 - 1, num_windows=1)
    exact = (299 * 1 + 100 * math.log2(255 / 0.5)) / 399  # the first byte of a window is not predicted
    assert windows == pytest.approx(exact, rel=1e-5)
    assert windows == pytest.approx(expected, rel=0.01)


def test_evaluation_is_the_same_every_time_and_hardly_depends_on_the_batch_size():
    model = build_language_model(LanguageModelConfig(hidden=16, layers=1, heads=1, context=32), seed=0)
    one = bits_per_byte(model, HELD_OUT, context=32, num_windows=12, batch_size=5)
    assert one == bits_per_byte(model, HELD_OUT, context=32, num_windows=12, batch_size=5)
    assert one == pytest.approx(bits_per_byte(model, HELD_OUT, context=32, num_windows=12, batch_size=12), rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_in_the_mode_it_was_in_without_gradients(training):
    model = build_language_model(LanguageModelConfig(hidden=16, layers=1, heads=1, context=32), seed=0).train(training)
    bits_per_byte(model, HELD_OUT, context=32, num_windows=2)
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_windows_reach_from_the_first_byte_to_the_last():
    windows = held_out_windows(HELD_OUT, context=100, num_windows=7)
    assert torch.equal(windows[0], HELD_OUT[:100].long())
    assert torch.equal(windows[-1], HELD_OUT[-100:].long())
    assert held_out_windows(HELD_OUT, context=3000, num_windows=1).shape == (1, 3000)


def test_a_slice_shorter_than_a_window_is_one_line():
    with pytest.raises(DataError, match="one window needs 3001"):
        held_out_windows(HELD_OUT, context=3001, num_windows=1)


# ---- the text at ``--data``, and whether it is what the terms say ----

LINE = b"the quick brown fox. "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two texts and a picture."""
    path = tmp_path / "foxes"
    path.mkdir()
    (path / "b.txt").write_bytes(LINE * 5000)
    (path / "a.txt").write_text("Schöne Grüße, Лиса! " * 100, encoding="utf-8")
    (path / "c.png").write_bytes(b"\0PNG")
    return path


def test_files_bytes_and_the_share_that_is_text_are_counted(folder: Path) -> None:
    found = survey(folder)
    assert (found.num_files, found.text_share) == (2, 1.0)
    assert found.nbytes == load_corpus(folder).nbytes
    files = "2 files (1 file of 4 bytes passed over, c.png: zero bytes near the beginning, so no text)"
    assert f"{folder}: {files}, {found.nbytes:,} bytes, 100.0 % of it text, digest {found.digest[:8]}" == str(found)


def test_a_folder_without_text_is_refused_with_what_was_passed_over_and_why(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(random.Random(name).randbytes(50_000))
    (tmp_path / "c").write_text("a word")
    passed = r"2 files of 100,000 bytes passed over, a, b: zero bytes near the beginning, so no text"
    with pytest.raises(DataError, match=rf"holds 6 bytes of text in 1 file \({passed}\), at least 65536 are needed"):
        survey(tmp_path)


def test_the_digest_is_of_what_is_trained_on_wherever_chunks_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = load_corpus(folder)
    tokens = bytes(corpus.train.tolist()) + bytes(corpus.held_out.tolist())
    expected = hashlib.blake2b(b"decentral corpus 1\n" + tokens, digest_size=32).hexdigest()
    whole = survey(folder)
    assert whole.digest == expected
    monkeypatch.setattr(corpus_module, "_CHUNK_NBYTES", 7)  # inside the letters of two bytes, too
    assert survey(folder) == whole


def test_bytes_that_are_no_text_are_refused_with_the_bound(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(random.Random(0).randbytes(200_000))
    with pytest.raises(DataError, match=r"is no text: 4. % of its 200000 bytes are UTF-8 text, at least 75 % are"):
        survey(tmp_path / "noise")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_prose_in_french_is_text_in_both_of_its_encodings(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "prose").write_text("Les élèves étaient déjà là, à la fenêtre. " * 3000, encoding=encoding)
    assert survey(tmp_path / "prose").text_share > 0.75


@pytest.mark.parametrize(("size", "match"), [(None, "cannot be read"), (MIN_NBYTES - 1, "at least 65536 are needed")])
def test_what_cannot_be_trained_on_is_refused(tmp_path: Path, size: int | None, match: str) -> None:
    if size is not None:
        (tmp_path / "text").write_bytes(b"x" * size)
    with pytest.raises(DataError, match=match):
        survey(tmp_path / "text")


FOUND = Survey(Path("copy"), 1, 100_000, 1.0, "ab" * 32)
AGREED = [
    (Data(), None, "the standard library's source"),
    (Data(corpus="foxes", digest="ab" * 32), FOUND, "the run's foxes"),
    (Data(corpus="foxes"), FOUND, "asks for no digest: each peer may bring its own foxes"),
]
REFUSED = [
    (Data(), FOUND, "trains on the standard library.*drop --data, or .*decentral init RUN.toml --data copy"),
    (Data(corpus="foxes"), None, "the run trains on foxes; name your copy of it with --data PATH"),
    (Data(corpus="foxes", digest="cd" * 32), FOUND, "its digest is abababab, the run's cdcdcdcd"),
]


@pytest.mark.parametrize(("terms", "found", "said"), AGREED)
def test_a_text_that_the_terms_allow_is_named(terms: Data, found: Survey | None, said: str) -> None:
    assert said in check_agreed(terms, found)


@pytest.mark.parametrize(("terms", "found", "match"), REFUSED)
def test_a_text_that_the_terms_do_not_mean_is_refused(terms: Data, found: Survey | None, match: str) -> None:
    with pytest.raises(DataError, match=match):
        check_agreed(terms, found)
