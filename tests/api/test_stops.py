from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.api.openai.answer import StopMatcher


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.matched is not None:
            return "".join(shown), matcher.matched, shown
    shown.append(matcher.finish())
    return "".join(shown), matcher.matched, shown


def test_a_stop_string_across_pieces_ends_the_text_before_it() -> None:
    text, matched, shown = run(["Hello wo", "r", "ld", " and more"], ["world"])
    assert (text, matched) == ("Hello ", "world")
    assert shown[0] == "Hello "  # what may be the stop string's beginning is held back, no more than that


def test_the_first_to_be_complete_wins_and_of_those_the_longest() -> None:
    assert run(["xaby"], ["xaby", "ab"])[:2] == ("x", "ab")
    assert run(["say stop"], ["stop", "y stop"])[:2] == ("sa", "y stop")


def test_without_stop_strings_nothing_is_held() -> None:
    matcher = StopMatcher([])
    assert matcher.push("a\n") == "a\n"


LETTERS = st.text("ab\n", max_size=24)


@given(text=LETTERS, stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), data=st.data())
def test_the_answer_does_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    pieces, rest = [], text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    assert run(pieces, stops)[:2] == run(list(text), stops)[:2]
    shown, matched, _ = run(pieces, stops)
    if matched is None:
        assert shown == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(shown + matched)
        assert not any(stop in shown for stop in stops)
