"""The grammar of answers with calls that a model must make, or must write correctly, in its own format."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.api.answer_format import OfferedTool
from tandem.api.formats.calls import CallWriting
from tandem.api.lark import ANY_TEXT, LarkWriter, nested
from tandem.api.text.tokenizer import Tokenizer


class CallGrammar:
    """Makes grammars of calls to the given tools. `once`: at most one call."""

    def __init__(self, calls: CallWriting, tools: Sequence[OfferedTool], tokenizer: Tokenizer, *, once: bool) -> None:
        self._calls = calls
        self._layout = calls.layout
        self._tools = tools
        self._writer = LarkWriter(tokenizer, self._layout.marks)
        self._most = 1 if once else self._layout.most

    def must_call(self) -> str:
        return self._with_calls(["start: calls", f"calls: {self._begun('')}"])

    def call_or(self, answer: str) -> str:
        """Returns a grammar of either calls or an answer by the given grammar."""
        rules = ["start: calls | answer", f"answer: {nested(answer)}", f"calls: {self._begun('')}"]
        return self._with_calls(rules)

    def text_with_calls(self) -> str:
        """Returns a grammar of free text in which a call may begin anywhere that the reader of calls would
        find it. From there on, the call's grammar holds."""
        opening = self._calls.opening
        text = rf"TEXT: {ANY_TEXT}" if opening is None else rf"TEXT: /\s*([^\s{_in_class(opening)}](.|\n)*)?/"
        written = self._layout.begin + self._layout.call_begin
        mark = next(filter(written.startswith, self._calls.begins), self._calls.begins[0])
        lead = self._writer.text_until("lead", mark, "TEXT")
        if self._layout.last:
            unmarked = "" if opening is None else f" | {self._begun(mark)}"
            return self._with_calls(
                [f"start: called | TEXT{unmarked}", f"called: lead {self._begun(mark)}", lead, text]
            )
        start = "start: called | TEXT" if self._most == 1 else "start: called* TEXT"
        most = self._most if self._layout.begin else 1  # how many calls one mark begins
        return self._with_calls([start, f"called: lead {self._begun(mark, most)}", lead, text])

    def _begun(self, mark: str, most: int | None = None) -> str:
        """Returns a rule for calls after their opening mark."""
        layout, literal = self._layout, self._writer.literal
        most = self._most if most is None else most
        begin = literal((layout.begin + layout.call_begin).removeprefix(mark))
        call_end = literal(layout.call_end)
        again = f"{literal(layout.between + layout.call_begin)} call {call_end}"
        more = f"({again}){{0,{most - 1}}}" if most > 1 else ""
        return f"{begin} call {call_end} {more} {literal(layout.end)}"

    def _with_calls(self, rules: Sequence[str]) -> str:
        names = " | ".join(f"call_{index}" for index in range(len(self._tools)))
        return "\n".join([*rules, f"call: {names}", *self._rules_of_tools()])

    def _rules_of_tools(self) -> list[str]:
        return [
            rule
            for index, tool in enumerate(self._tools)
            for rule in self._calls.rules(
                f"call_{index}", tool.name, tool.schema, self._writer, lenient=not tool.strict
            )
        ]


def _in_class(character: str) -> str:
    """Escapes a character for a character class of a regular expression."""
    return f"\\{character}" if character in "[]^\\-" else character
