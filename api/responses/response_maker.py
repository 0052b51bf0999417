"""Makes an answer's items, and its numbered events while it is written."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import msgspec

from tandem.api.openai.answer import Choice, Delta, PieceReader
from tandem.api.openai.generation_plan import GenerationPlan
from tandem.api.pieces import AnswerReader, Arguments, CallBegins, Piece, Reasoning, Text
from tandem.base.errors import TandemError


def new_response_id() -> str:
    return f"resp_{secrets.token_hex(24)}"


class ResponseMaker:
    """Makes one response. `body` is the response in its present state. Events are numbered in order.

    Ids follow from the response's id, so another router makes the same events from the same tokens, taken one
    at a time.
    """

    def __init__(self, body: dict[str, Any], reader: AnswerReader | None) -> None:
        self.body = body
        self._reader = PieceReader(reader)
        self._number = 0
        self._ids = 0
        self._item: dict[str, Any] | None = None  # the item that is being written
        self._written: list[str] = []
        self._space = ""

    def _new_id(self, prefix: str) -> str:
        self._ids += 1
        digest = hashlib.sha256(f"{self.body['id']} {self._ids}".encode()).hexdigest()
        return f"{prefix}_{digest[:48]}"

    def begin(self) -> list[bytes]:
        self.body["status"] = "in_progress"
        return [
            self._event("response.created", response=self.body),
            self._event("response.in_progress", response=self.body),
        ]

    def events(self, delta: Delta) -> list[bytes]:
        return [event for piece in self._reader.read(delta) for event in self._show(piece)]

    def complete(self, plan: GenerationPlan, choice: Choice) -> list[bytes]:
        whole = choice.finish_reason != "length"
        out = self._close("completed" if whole and not self._reader.cut_call else "incomplete")
        if not whole:
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        figures = plan.usage([choice])
        reasoning = figures.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        self.body["usage"] = {
            "input_tokens": figures["prompt_tokens"],
            "input_tokens_details": figures["prompt_tokens_details"],
            "output_tokens": figures["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": figures["total_tokens"],
        }
        return [*out, self._end("completed" if whole else "incomplete")]

    def fail(self, error: TandemError) -> list[bytes]:
        out = self._close("incomplete")
        self.body["error"] = {"code": error.code, "message": str(error)}
        return [*out, self._end("failed")]

    def cancel(self) -> list[bytes]:
        """Ends a cancelled response. The API has no event for that, so the stream ends like an incomplete
        one's."""
        out = self._close("incomplete")
        self.body["status"] = "cancelled"
        return [*out, self._event("response.incomplete", response=self.body)]

    def _end(self, status: str) -> bytes:
        self.body["status"] = status
        return self._event(f"response.{status}", response=self.body)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(body))

    # --- items ------------------------------------------------------------------------------------------------

    def _show(self, piece: Piece) -> list[bytes]:
        match piece:
            case CallBegins(call_id, name):
                call_id = call_id or self._new_id("call")
                fields = {"call_id": call_id, "name": name, "arguments": ""}
                return self._open({"id": self._new_id("fc"), "type": "function_call", **fields})
            case Arguments(text):
                return [self._more("response.function_call_arguments.delta", text)]
            case Reasoning(text):
                out: list[bytes] = []
                if not self._in("reasoning"):
                    out = self._open({"id": self._new_id("rs"), "type": "reasoning", "summary": [], "content": []})
                return [*out, self._more("response.reasoning_text.delta", text, content_index=0)]
            case Text(text):
                out = []
                if not self._in("message"):
                    text = self._space + text
                    if not text.strip():
                        self._space = text  # white space alone, between other items, is no message
                        return []
                    out = self._open_message()
                return [*out, self._more("response.output_text.delta", text, content_index=0, logprobs=[])]

    def _in(self, kind: str) -> bool:
        return self._item is not None and self._item["type"] == kind

    @property
    def _place(self) -> dict[str, Any]:
        item = self._item or {}
        return {"item_id": item.get("id"), "output_index": len(self.body["output"])}

    def _open(self, item: dict[str, Any]) -> list[bytes]:
        out = self._close("completed")
        self._item, self._space = {**item, "status": "in_progress"}, ""
        place = {"output_index": len(self.body["output"])}
        return [*out, self._event("response.output_item.added", **place, item=self._item)]

    def _open_message(self) -> list[bytes]:
        out = self._open({"id": self._new_id("msg"), "type": "message", "role": "assistant", "content": []})
        part = {"type": "output_text", "text": "", "annotations": []}
        return [*out, self._event("response.content_part.added", **self._place, content_index=0, part=part)]

    def _more(self, kind: str, text: str, **fields: Any) -> bytes:
        self._written.append(text)
        return self._event(kind, **self._place, delta=text, **fields)

    def _close(self, status: str) -> list[bytes]:
        """Ends the item that is being written."""
        item, text = self._item, "".join(self._written)
        if item is None:
            return []
        place, out = self._place, []
        if item["type"] == "message":
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            item["content"] = [part]
            out.append(self._event("response.output_text.done", **place, content_index=0, text=text, logprobs=[]))
            out.append(self._event("response.content_part.done", **place, content_index=0, part=part))
        elif item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            out.append(self._event("response.reasoning_text.done", **place, content_index=0, text=text))
        else:
            item["arguments"] = text
            done = {"arguments": text, "name": item["name"]}
            out.append(self._event("response.function_call_arguments.done", **place, **done))
        item["status"] = status
        out.append(self._event("response.output_item.done", output_index=place["output_index"], item=item))
        self.body["output"].append(item)
        self._item, self._written = None, []
        return out
