"""Signs whole answers for requests that ask for a receipt, if the operator has given the routers a key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.api.openai.generation_plan import GenerationPlan
from tandem.api.openai.reading import ReadChoice
from tandem.base.errors import ConfigurationError
from tandem.router.dispatch import Generation
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.operation import ApiOperation
from tandem.router.http.page_figures import VERSION
from tandem.router.http.services import Services
from tandem.router.promises import RECEIPT_HEADER, AnswerSigner, refused
from tandem.router.receipts.live import AskAgain, AskedAgain, ask_again
from tandem.router.receipts.receipt import (
    LEAST_KEY_BYTES,
    AnswerMarks,
    Receipt,
    digest_of_tokens,
    is_signed_by,
    marks_of,
    read_receipt,
    signed,
)
from tandem.router.wings import RouteRow, RouterWing
from tandem.wire.nodes import COMPUTED_BY

_SIGN = "sign"
# Where a request may name the seed by which it is made again.
_PATHS = ("/v1/completions", "/v1/chat/completions")
_NONE_YET = AnswerMarks(0, 1, "", "")


class Receipts(RouterWing):
    # fmt: off
    operations = (
        ApiOperation(
            "post", "/verify", "Ask some requests again of new nodes, and compare", AskedAgain, AskAgain, ("400", "401"),
            example={"old": ["decode-0"], "seconds": 2},
        ),
    )
    # fmt: on

    def routes(self) -> list[RouteRow]:
        return [("/verify", ask_again, ["POST"])]

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        if (file := services.config.receipt_key_file) is not None:
            services.signer = ReceiptSigner(services, read_key(Path(file)))


def read_key(file: Path) -> bytes:
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(f"router.receipt_key_file {file} cannot be read: {error.strerror}") from error
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigurationError(
            f"router.receipt_key_file {file} has {len(key)} bytes, which can be guessed: write at least {LEAST_KEY_BYTES} random ones, such "
            f"as `openssl rand -hex 32 > {file}`"
        )
    return key


class ReceiptSigner(AnswerSigner):
    def __init__(self, services: Services, key: bytes) -> None:
        self._services = services
        self._key = key

    def check(self, exchange: HttpExchange, plan: GenerationPlan, *, streams: bool) -> None:
        if (asked := exchange.header(RECEIPT_HEADER)) is None:
            return
        if exchange.route not in _PATHS:
            raise refused(RECEIPT_HEADER, f"is of answers at {' and '.join(_PATHS)}")
        if streams:
            raise refused(RECEIPT_HEADER, "not with stream, because it is a header of the whole answer")
        if len(plan.specs) != 1:
            raise refused(
                RECEIPT_HEADER,
                f"is of one answer, and this request has {len(plan.specs)}: send one prompt, and leave n out",
            )
        facts = plan.specs[0].facts
        if facts.media or facts.embeds is not None:
            raise refused(RECEIPT_HEADER, "is of prompts of tokens, and this one has images or tensors")
        views = self._services.pool.view.snapshot()
        if not all(COMPUTED_BY in view.info.content for view in (*views.prefill, *views.decode)):
            raise refused(
                RECEIPT_HEADER,
                "this server's nodes do not promise the same bits, so there is nothing to sign: the operator sets model.exact to require",
            )
        if (text := asked.decode("latin-1")) != _SIGN:
            self._check_earlier(text, self._receipt(exchange, plan, "", _NONE_YET))

    def _check_earlier(self, text: str, mine: Receipt) -> None:
        """`text` is a receipt that the request should make again. What is not signed is not read."""
        if not is_signed_by(text, self._key):
            raise refused(
                RECEIPT_HEADER,
                "this cluster did not sign this receipt, or it was changed since; to get a new one, say `sign`",
            )
        if other := read_receipt(text).other_request(mine):
            raise refused(RECEIPT_HEADER, f"it is the receipt of another request, which differs in its {other}")

    def headers(
        self, exchange: HttpExchange, plan: GenerationPlan, generation: Generation, read: Sequence[ReadChoice]
    ) -> list[tuple[bytes, bytes]]:
        if exchange.header(RECEIPT_HEADER) is None:
            return []
        (one,) = read
        choice, (life,) = one.choice, generation.lives
        ledger, decision = life.ledger, life.decisions[-1]
        wants_values = plan.specs[0].facts.sampling.logprobs is not None
        marks = marks_of(
            ledger.tokens[: choice.completion_tokens],
            ledger.logprobs.row if wants_values else None,
            choice.finish_reason or "",
        )
        content = next(node.content for node in (decision.decode, decision.prefill) if node is not None)
        return [(RECEIPT_HEADER, signed(self._receipt(exchange, plan, content, marks), self._key).encode())]

    def _receipt(self, exchange: HttpExchange, plan: GenerationPlan, content: str, marks: AnswerMarks) -> Receipt:
        facts = plan.specs[0].facts
        sampling = msgspec.to_builtins(facts.sampling, str_keys=True)
        if facts.sampling.grammar is not None:
            sampling["grammar"] = hashlib.sha256(facts.sampling.grammar.encode()).hexdigest()
        return Receipt(
            tandem=VERSION,
            path=exchange.route,
            content=content,
            adapter=facts.lora or "",
            prompt=digest_of_tokens(facts.prompt_token_ids),
            sampling=sampling,
            answer=marks,
        )


WING = Receipts
