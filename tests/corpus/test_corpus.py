"""Every file of the corpus ends in exactly its error, or is accepted."""

import tomllib

import pytest

from tests.corpus.make import ACCEPTED, FOLDER, entries, path_of, table
from tests.fuzz.targets import TARGETS

TABLE = tomllib.loads((FOLDER / "corpus.toml").read_text(encoding="ascii"))
del TABLE["skipped"]


@pytest.mark.parametrize("target", TABLE)
def test_it_ends_in_its_error(target: str) -> None:
    for path, words in TABLE[target].items():
        data = (FOLDER / path).read_bytes()
        if words == ACCEPTED:
            TARGETS[target].read(data)
            continue
        with pytest.raises(TARGETS[target].refusal) as caught:
            TARGETS[target].read(data)
        assert words in str(caught.value), path
        assert len(str(caught.value)) < 1000, path
        assert str(caught.value).isprintable(), path


def test_the_files_are_those_that_the_script_makes() -> None:
    made = {path_of(target, name): data for target, name, data, _ in entries()}
    assert len(made) == len(entries()), "two entries have one name"
    assert made == {str(path.relative_to(FOLDER)): path.read_bytes() for path in FOLDER.glob("*/*.bin")}
    assert table() == (FOLDER / "corpus.toml").read_text(encoding="ascii")


def test_every_target_has_files_that_are_refused() -> None:
    of_every_compressor = ("body ", "bodies ", "frame ")
    unseen = {name for name in TARGETS if name not in TABLE and not name.startswith(of_every_compressor)}
    assert unseen == {"any frame", "sealed frame"}
