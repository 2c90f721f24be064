"""Who trains with a peer, as its leases tell."""

from decentral.node.node import Company

ME, A, B = b"me", b"a", b"b"


def nobody_said_goodbye(peer: bytes) -> bool:
    return False


def test_being_left_alone_is_told_once_with_those_who_were_here_last() -> None:
    company = Company()
    looks = [([A, B], (ME, A, B)), ([B], (ME, B)), ([], (ME,)), ([], (ME,))]
    assert [company.look(live, members, lambda peer: True) for live, members in looks] == [False, False, True, False]
    assert (company.gone, company.left) == ({B}, True)


def test_who_fell_silent_did_not_leave_and_is_company_again_when_it_is_heard_of() -> None:
    company = Company()
    company.look([A], (ME, A), nobody_said_goodbye)
    assert company.look([], (ME, A), nobody_said_goodbye)
    assert (company.gone, company.left) == ({A}, False)
    assert not company.look([A], (ME, A), nobody_said_goodbye)
    assert company.gone == frozenset()


def test_who_only_asks_for_the_terms_is_no_company_and_who_rests_is() -> None:
    company = Company()
    assert not company.look([A], (ME,), nobody_said_goodbye)
    assert not company.look([], (ME,), nobody_said_goodbye)
    company.look([B], (ME, B), nobody_said_goodbye)
    assert not company.look([B], (ME,), nobody_said_goodbye)  # it paused, and is no member for now
    assert company.here == {B}
