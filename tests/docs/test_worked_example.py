"""The frame that docs/protocol.md shows byte by byte is the one that is sent."""

import re
from pathlib import Path

import torch

from decentral.compressors import parse_compressor
from decentral.compressors.feedback import ErrorFeedback
from decentral.wire import body

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def test_the_worked_example_shows_the_bytes_the_values_and_the_debt_of_a_frame() -> None:
    text = PAGE[PAGE.index("**One SparseLoCo frame, byte by byte.**") :]
    matrix = [[float(word) for word in row.split()] for row in text.split("```")[1].strip().splitlines()]
    streams = re.findall(r"^\| `((?:[0-9a-f]{2} ?)+)` \|", text.split("All peers add")[0], re.MULTILINE)
    sent, kept = text.split("All peers add")[1].split("The sender keeps")
    compressor = parse_compressor("topk(k=4, chunk=16) >> signmag2")
    given_N = torch.tensor(matrix).flatten()

    sending = ErrorFeedback(beta=0.95).send(compressor, given_N, {}, ((4, 4),))

    assert bytes(body.encode(compressor, sending.payloads)) == bytes.fromhex("".join(streams))
    value_N = compressor.decompress(sending.payloads)[0].tensor().flatten()
    assert value_N[value_N != 0].tolist() == [float(word) for word in re.findall(r"-?\d+\.\d+", sent)]
    debt_N = sending.state["debt"]
    assert debt_N[debt_N != 0].tolist() == [
        *(float(word) for word in re.findall(r"-?0\.\d+", kept.split("\n\n")[0])),
        -1.0,
    ]
    assert torch.equal(value_N + debt_N, given_N)
