"""A receipt is known by its key, says which request it is of, and where two answers part."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tandem.base.errors import ConfigurationError
from tandem.router.receipts.receipt import AnswerMarks, Receipt, is_signed_by, marks_of, read_receipt, signed

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def marks(tokens: list[int], other_bits_at: int | None = None, end: str = "length") -> AnswerMarks:
    def values(at: int) -> tuple[list[int], list[float]]:
        logprob = -0.1 * (at + 1)
        return [tokens[at]], [math.nextafter(logprob, 0.0) if at == other_bits_at else logprob]

    return marks_of(tokens, values, end)


def receipt(**changes: Any) -> Receipt:
    sampling = {"seed": 7, "temperature": 0.5}
    fields: dict[str, Any] = {
        "path": "/v1/completions",
        "content": "a+b",
        "adapter": "",
        "prompt": "p",
        "sampling": sampling,
    }
    return Receipt(tandem="1", **{**fields, "answer": marks([1, 2, 3]), **changes})


def test_what_was_signed_is_read_again_and_one_other_letter_is_refused() -> None:
    text = signed(receipt(), KEY)
    assert read_receipt(text) == receipt()
    assert is_signed_by(text, KEY)
    assert not is_signed_by(text, OTHER_KEY)
    changed = signed(receipt(content="another"), OTHER_KEY).split(".")[0] + "." + text.split(".")[1]
    assert read_receipt(changed).content == "another"
    assert not is_signed_by(changed, KEY)


@pytest.mark.parametrize("text", ["", "a", "a.b.c", "!.!", "e30.e30"])
def test_what_is_no_receipt_is_said_to_be_none(text: str) -> None:
    assert not is_signed_by(text, KEY)
    with pytest.raises(ConfigurationError, match="this is no receipt"):
        read_receipt(text)


@pytest.mark.parametrize("name", ["path", "adapter", "prompt", "sampling"])
def test_a_receipt_is_of_one_request(name: str) -> None:
    changed = {"seed": 8} if name == "sampling" else "other"
    assert receipt().other_request(receipt(**{name: changed})) == name
    assert receipt().other_request(receipt(content="other")) == ""


@pytest.mark.parametrize(("length", "at"), [(1, 0), (5, 4), (128, 77), (1000, 0), (1000, 517), (1000, 999)])
def test_one_bit_is_found_where_it_is(length: int, at: int) -> None:
    tokens = list(range(length))
    assert marks(tokens).parts_from(marks(tokens)) is None
    found = marks(tokens).parts_from(marks(tokens, at))
    assert found is not None
    assert at in found
    assert len(found) <= max(1, length // 64)


def test_an_answer_that_ends_earlier_parts_where_it_ends() -> None:
    long = marks(list(range(1000)))
    found = long.parts_from(marks(list(range(300))))
    assert found is not None
    assert 300 in found
    assert marks([1, 2]).parts_from(marks([1, 2], end="stop")) == range(2, 3)
    assert marks([1, 2]).parts_from(marks([1, 3])) == range(1, 2)
