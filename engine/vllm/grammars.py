"""Grammars of vLLM's requests, which vLLM compiles with the library that Tandem's engine has, too."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tandem.base.own_thread import in_deep_stack
from tandem.engine.request import Request

T = TypeVar("T")

_AT_ONCE = 4


class DeepExecutor(ThreadPoolExecutor):
    """Takes the place of the pool in which vLLM compiles: there a long chain of references would overflow a thread's stack, and end the node."""

    def __init__(self) -> None:
        super().__init__(_AT_ONCE, thread_name_prefix="grammars")

    def submit(self, call: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        return super().submit(in_deep_stack, partial(call, *args, **named))


def begin_grammar(manager: Any, request: Request, theirs: Any) -> None:
    """vLLM would answer without a grammar that is wrong, and would begin a moved request's again, because it takes all tokens for the
    prompt."""
    asked = theirs.structured_output_request
    compiling = asked._grammar
    brought = list(request.all_token_ids[request.num_prompt_tokens :])

    def begin() -> Any:
        grammar = compiling.result()
        if error := grammar.ll_matcher.get_error():
            raise ValueError(error)
        if brought and not grammar.accept_tokens(request.request_id, brought):
            raise ValueError("the tokens so far do not follow it")
        return grammar

    asked.grammar = manager.executor.submit(begin)
