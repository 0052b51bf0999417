from __future__ import annotations

import pytest

from tandem.base import errors
from tandem.base.errors import InvalidRequest, RequestError, TandemError, WireError


def subclasses(root: type[TandemError]) -> list[type[TandemError]]:
    return [root, *(leaf for sub in root.__subclasses__() for leaf in subclasses(sub))]


OURS = [cls for cls in subclasses(TandemError) if cls.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", OURS)
def test_an_error_is_itself_again_on_the_other_side(cls: type[TandemError]) -> None:
    sent = cls("what happened")
    arrived = sent.to_wire().to_exception()
    assert arrived.code == sent.code
    assert arrived.http_status == sent.http_status
    assert str(arrived) == "what happened"
    assert isinstance(arrived, cls) or cls is RequestError
    if cls is RequestError:
        assert isinstance(arrived, InvalidRequest)


def test_codes_tell_errors_apart_and_one_from_a_newer_version_is_an_internal_error() -> None:
    codes = {cls.code for cls in OURS}
    assert len(codes) >= len(OURS) - 2  # InvalidRequest has its parent's, InternalError the root's
    assert WireError("unheard_of", "x").to_exception().http_status == 500
