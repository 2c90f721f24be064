import click
import pytest

from decentral.cli.quantities import Rate, Size


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("20mbit", 2.5e6),
        ("20 Mbit/s", 2.5e6),
        ("2MB/s", 2e6),
        ("2.5MB/s", 2.5e6),
        ("600kB/s", 6e5),
        ("1.5Mbit", 187_500.0),
        ("1gbit", 1.25e8),
        ("264kbit", 33_000.0),
    ],
)
def test_a_rate_is_read_as_links_are_sold(text: str, rate: float) -> None:
    assert Rate().convert(text, None, None) == rate


@pytest.mark.parametrize("text", ["", "20", "mbit", "5mb", "5Mb/s", "5mb/s", "-1mbit", "1e3mbit", "5mbit/h"])
def test_what_may_be_bits_or_bytes_or_neither_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write it as 20mbit or"):
        Rate().convert(text, None, None)


@pytest.mark.parametrize("text", ["0mbit", "250kbit", "30kB/s"])
def test_a_rate_with_which_nobody_can_take_part_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="263kbit is the least"):
        Rate().convert(text, None, None)


@pytest.mark.parametrize(("text", "nbytes"), [("50GB", 50 * 10**9), ("0.5 tb", 5 * 10**11), ("800MB", 8 * 10**8)])
def test_a_size_is_read_in_decimal_units(text: str, nbytes: int) -> None:
    assert Size().convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "50", "50G", "0GB", "-1GB", "50gbit", "50GB/s"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write it as 50GB or 800MB"):
        Size().convert(text, None, None)
