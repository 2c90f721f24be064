"""Each mechanism's own equation, and the problem that it was made for."""

import pytest
import torch
from torch import Tensor

from decentral.compressors import (
    Feedback,
    Int8,
    SignMag2,
    TopK,
    Uncompressed,
    describe_feedback,
    parse_feedback,
)
from decentral.compressors.base import add_flat
from decentral.compressors.ef21 import EF21, EControl
from decentral.compressors.feedback import ErrorFeedback, NoFeedback
from decentral.compressors.threshold import DGC
from decentral.errors import ConfigError
from tests.kit.owing import compress_with_debt

ONE_OF_3 = TopK(k=1, chunk=4)
ONE_OF_4 = TopK(k=1, chunk=4)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def averaged(feedback: Feedback, gradients_of, x: Tensor, rate: float, rounds: int) -> list[Tensor]:
    """Gradient descent of several peers, each compressing its own gradient."""
    peers, held, path = [{} for _ in gradients_of(x)], [{} for _ in gradients_of(x)], [x]
    for _ in range(rounds):
        mean = torch.zeros_like(x)
        for i, gradient in enumerate(gradients_of(x)):
            sending = feedback.send(ONE_OF_3, gradient, peers[i], ((3,),))
            arrived = torch.zeros_like(x)
            add_flat(ONE_OF_3, arrived, sending.payloads)
            receiving = feedback.receive(arrived, held[i])
            peers[i], held[i] = sending.state, receiving.state
            mean += receiving.estimate_N / len(peers)
        x = x - rate * mean
        path.append(x)
    return path


A = torch.tensor([[-3.0, 2.0, 2.0], [2.0, -3.0, 2.0], [2.0, 2.0, -3.0]])


def unlike_peers(x: Tensor) -> list[Tensor]:
    """f_i = <a_i, x>**2 + |x|**2 / 4: the three largest gradients point away from the optimum, 0."""
    return [2 * (a @ x) * a + x / 2 for a in A]


def test_a_biased_compressor_alone_diverges_on_a_quadratic_where_ef21_and_econtrol_converge():
    """The example of Beznosikov et al., "On Biased Compression", 2020, arXiv:2002.12410."""
    start = torch.ones(3)
    size = {}
    for spelling in ("none", "ef21", "econtrol(eta=0.05)"):
        size[spelling] = float(averaged(parse_feedback(spelling), unlike_peers, start, 0.01, 1000)[-1].norm())
    assert size["none"] > 100
    assert size["ef21"] < 1e-3
    assert size["econtrol(eta=0.05)"] < 1e-3


def test_a_biased_compressor_alone_stalls_where_peers_disagree_and_ef21_does_not():
    """Constant steps; the mean gradient is 0 at the optimum, the peers' are not."""
    centre = torch.tensor([[9.0, 0.0, 1.0], [-9.0, 0.0, 1.0], [0.0, 0.5, 1.0]])

    def gradients(x: Tensor) -> list[Tensor]:
        return [x - c for c in centre]

    best = centre.mean(0)
    lost = {s: float((averaged(parse_feedback(s), gradients, torch.zeros(3), 0.1, 400)[-1] - best).norm())
            for s in ("none", "ef21", "econtrol(eta=0.05)")}  # fmt: skip
    assert lost["none"] > 0.1
    assert lost["ef21"] < 1e-4
    assert lost["econtrol(eta=0.05)"] < 1e-2


def test_econtrol_with_eta_0_sends_what_ef21_sends():
    ours, theirs = {}, {}
    for seed in range(6):
        gradient = gaussian(4096, seed=seed)
        a = EControl(eta=0).send(TopK(), gradient, ours, ((4096,),))
        b = EF21().send(TopK(), gradient, theirs, ((4096,),))
        assert all(torch.equal(x, y) for x, y in zip(a.payloads[0].parts, b.payloads[0].parts, strict=True))
        ours, theirs = a.state, b.state
        assert torch.equal(ours["sent"], theirs["sent"])


def test_ef_over_many_shapes_is_ef_of_each():
    shapes, chain = ((64, 65), (13,)), TopK() >> SignMag2()
    state, debts = {}, [None, None]
    for seed in range(4):
        flat = gaussian(64 * 65 + 13, seed=seed)
        sending = ErrorFeedback(beta=0.95).send(chain, flat, state, shapes)
        for i, piece in enumerate((flat[: 64 * 65].view(64, 65), flat[64 * 65 :])):
            payload, debts[i] = compress_with_debt(chain, piece, debts[i], 0.95)
            assert all(torch.equal(a, b) for a, b in zip(payload.parts, sending.payloads[i].parts, strict=True))
        state = sending.state
        assert torch.equal(state["debt"], torch.cat([debt.flatten() for debt in debts]))


def test_dgc_by_hand():
    """momentum 0.5, one of four is sent: entry 0 first, then entry 1 with the velocity it gathered."""
    state, sent = {}, []
    for gradient in ([4.0, 2.0, 0.0, 0.0], [1.0, 2.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]):
        sending = DGC(momentum=0.5).send(ONE_OF_4, torch.tensor(gradient), state, ((4,),))
        state = sending.state
        total = torch.zeros(4)
        add_flat(ONE_OF_4, total, sending.payloads)
        sent.append(total.tolist())
    # u: [4,2] masked to [0,2]; [1,3], v [1,5], masked to [1,0]; [1.5,0], v [2.5,0]
    assert sent == [[4.0, 0, 0, 0], [0, 5.0, 0, 0], [2.5, 0, 0, 0]]
    assert state["velocity"].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert state["debt"].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_dgc_without_momentum_is_error_feedback_without_decay():
    one, other = {}, {}
    for seed in range(5):
        gradient = gaussian(4096, seed=seed)
        a = DGC(momentum=0).send(TopK(), gradient, one, ((4096,),))
        b = ErrorFeedback(beta=1).send(TopK(), gradient, other, ((4096,),))
        one, other = a.state, b.state
        assert torch.equal(one["debt"], other["debt"])


def test_dgc_keeps_a_quantisers_error_and_masks_its_velocity():
    sending = DGC().send(TopK() >> Int8(block=64), gaussian(4096), {}, ((4096,),))
    total = torch.zeros(4096)
    add_flat(TopK() >> Int8(block=64), total, sending.payloads)
    assert torch.equal(sending.state["debt"], gaussian(4096) - total)
    assert not sending.state["velocity"][total != 0].any()
    assert torch.equal(sending.state["velocity"][total == 0], gaussian(4096)[total == 0])


def test_without_feedback_nothing_is_kept():
    assert NoFeedback().send(Uncompressed(), torch.ones(2), {}, ((2,),)).state == {}


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("ef2", "feedback ef2 is not known here; if a package adds it, install that package, or did you mean ef21?"),
        ("econtroll(eta=0.1)", "did you mean econtrol?"),
        ("zzz", "install that package; known: "),
        ("ef(bta=0.5)", "feedback ef has no bta; did you mean beta?"),
        ("ef21(beta=0.5)", "feedback ef21 has no beta; known: nothing"),
        ("ef(beta=1.5)", "ef(beta=1.5): the debt's decay must be in [0, 1]"),
        ("ef(beta=nan)", "must be in [0, 1]"),
        ("econtrol(eta=-1)", "the share of the debt must be in [0, 1]"),
        ("dgc(momentum=1)", "momentum must be in [0, 1)"),
        ("ef(0.95)", 'feedback ef: "0.95" is not key=number'),
        ("ef(beta=0.95", "want name or name(key=number, ...), such as ef(beta=0.95)"),
        ("ef" * 200, "at most 256"),
        ("", "want name or name"),
    ],
)
def test_a_spelling_that_cannot_be_meant_says_what_could(spelling: str, message: str):
    with pytest.raises(ConfigError) as caught:
        parse_feedback(spelling)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_mechanism_is_described_with_its_state_and_source():
    rows = {row["name"]: row for row in describe_feedback()}
    assert set(rows) == {"none", "ef", "ef21", "econtrol", "dgc"}
    assert (rows["econtrol"]["sender keeps"], rows["econtrol"]["receivers keep"]) == (
        "debt, sent",
        "sent of each sender",
    )
    assert all(row["source"] for row in rows.values())
    assert rows["ef"]["spelling"] == "ef(beta=0.95)"
