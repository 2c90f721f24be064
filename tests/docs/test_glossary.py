"""docs/glossary.md: one sentence and one module for each word, and the words that the other pages lean on."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/glossary.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([\w ]+) \| (.+?) \| `(decentral/[\w/]+\.py)` \|$", PAGE, flags=re.MULTILINE)
WANTED = {
    *(
        "run",
        "manifest",
        "peer",
        "swarm",
        "relay",
        "invite",
        "anchor",
        "change",
        "fragment",
        "channel",
        "compressor",
        "debt",
    ),
    *("frame", "round", "commit", "epoch", "snapshot", "quorum", "grace", "staleness", "follower", "H"),
    *("inner step", "outer step"),
}


def test_each_word_is_there_once_with_one_sentence_and_one_module():
    words = [word for word, _, _ in ROWS]
    assert len(words) == len(set(words)) == PAGE.count("\n| ") - PAGE.count("\n| Word |")
    assert set(words) >= WANTED
    for word, sentence, _ in ROWS:
        assert sentence.endswith("."), word
        assert ". " not in sentence, word
