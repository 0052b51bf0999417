"""vLLM's EngineCore as the engine of a node. Its steps run in the node's step thread.

`load` must run before anything else imports vLLM: some of its settings are environment variables that it reads when it is imported.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.base.errors import (
    ConfigurationError,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    RequestError,
    TandemError,
)
from tandem.base.progress import Report
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.config import EngineConfig, ModelConfig
from tandem.engine.contract import StepResult
from tandem.engine.model.checkpoint import eos_tokens
from tandem.engine.model.content import content_of
from tandem.engine.model.runner import ModelInfo
from tandem.engine.model.source import ModelSource, find_source
from tandem.engine.request import Request
from tandem.engine.scheduling.output import CachedRequestData, ModelOutput, SchedulerOutput
from tandem.engine.scheduling.state import SchedulerStats
from tandem.engine.tracing import StepTimes, Tracer
from tandem.engine.vllm.settings import arguments, environment
from tandem.kvtransfer.base import ConnectorOutput, TransferStats
from tandem.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from tandem.wire.requests import TokenChunk
from tandem.wire.sampling import FinishReason
from tandem.wire.tracing import TransferTrace

if TYPE_CHECKING:
    from tandem.engine.model.adapters import Adapters
    from tandem.engine.vllm.requests import VllmRequest

logger = logging.getLogger(__name__)


def load(config: EngineConfig, model: ModelConfig, progress: Report) -> VllmEngine:
    source = find_source(model.path)
    if source.gguf_file is not None:
        raise ConfigurationError(
            f"{source.name} is a GGUF file, and vLLM reads folders as transformers writes them: name such a folder with model.path"
        )
    for name, value in environment(model.device).items():
        os.environ.setdefault(name, value)
    progress("importing vLLM", 0.0)
    from vllm.config import KVEventsConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMError
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from tandem.engine.vllm.figures import watching
    from tandem.engine.vllm.requests import GRAMMARS

    progress("reading the weights to know them again", 0.0)
    content = content_of(source)
    progress("loading the model into vLLM", 0.1)
    try:
        made = EngineArgs(
            **arguments(config, model, source),
            structured_outputs_config={"backend": GRAMMARS},
            kv_events_config=KVEventsConfig(
                enable_kv_cache_events=config.cache.prefix_caching, publisher="null"
            ),
        ).create_engine_config()
        made.scheduler_config.scheduler_cls = watching(made.scheduler_config.get_scheduler_cls())
        core = EngineCore(made, Executor.get_class(made), log_stats=False)
    except (VLLMError, ValueError, TypeError, NotImplementedError, OSError) as error:
        raise ConfigurationError(f"vLLM does not load {source.name}: {error}") from error
    progress("ready", 1.0)
    # Its KV, its numbers and its noise are not those of another engine, so no request goes on there.
    identity = hashlib.sha256(f"vllm {content.digest}".encode()).hexdigest()
    return VllmEngine(core, _described(core, source, identity, content.tokenizer))


def _described(core: Any, source: ModelSource, content: str, tokenizer: str) -> ModelInfo:
    config, caches = core.vllm_config, core.scheduler.kv_cache_config
    model = config.model_config
    layers: list[str] = [name for group in caches.kv_cache_groups for name in group.layer_names]
    numbers = {name: number for number, name in enumerate(layers)}
    spec = caches.kv_cache_groups[0].kv_cache_spec if caches.kv_cache_groups else None
    return ModelInfo(
        name=source.name,
        content=content,
        tokenizer=tokenizer,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(config.device_config.device_type),
        vocab_size=model.get_vocab_size(),
        max_model_len=model.max_model_len,
        eos_token_ids=eos_tokens(source, model.hf_config),
        num_layers=len(layers),
        num_kv_heads=getattr(spec, "num_kv_heads", 0),
        head_dim=getattr(spec, "head_size", 0),
        groups=tuple(
            _group(group.kv_cache_spec, [numbers[name] for name in group.layer_names])
            for group in caches.kv_cache_groups
        ),
        num_blocks=caches.num_blocks,
    )


def _group(spec: Any, layers: Sequence[int]) -> KVCacheGroup:
    window = getattr(spec, "sliding_window", None)
    kind = AttentionKind.SLIDING if window else AttentionKind.FULL
    return KVCacheGroup(kind, spec.block_size, tuple(layers), window or None)


class _EventDesk:
    """Stands where vLLM has the publisher of its cache's events."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []
        self.keeps = False

    def publish(self, batch: Any) -> None:
        if self.keeps:
            self.events += [_event(event) for event in batch.events]

    def shutdown(self) -> None: ...


def _event(event: Any) -> KVEvent:
    match type(event).__name__:
        case "BlockStored":
            return BlockStored(
                [_hash(each) for each in event.block_hashes],
                _hash(event.parent_block_hash) if event.parent_block_hash is not None else None,
                event.token_ids,
                event.block_size,
                medium=event.medium,
                extra_keys=event.extra_keys,
                group_idx=event.group_idx or None,
            )
        case "BlockRemoved":
            return BlockRemoved(
                [_hash(each) for each in event.block_hashes], event.medium, event.group_idx or None
            )
        case "AllBlocksCleared":
            return AllBlocksCleared()
        case other:
            raise InternalError(f"vLLM's cache reports an event of an unknown kind, {other}")


def _hash(value: Any) -> bytes:
    return value if isinstance(value, bytes) else int(value).to_bytes(8, "big")


class VllmEngine:
    """A `NodeEngine`."""

    def __init__(self, core: Any, info: ModelInfo, clock: Callable[[], float] = time.monotonic) -> None:
        from tandem.engine.vllm.figures import VllmFigures

        self._core = core
        self._info = info
        self._clock = clock
        self._live: dict[str, VllmRequest] = {}
        self._desk = _EventDesk()
        core.scheduler.kv_event_publisher = self._desk
        block_size = info.groups[0].block_size if info.groups else 1
        self._figures = VllmFigures(core.scheduler, info.num_blocks, block_size)
        self._is_closed = False
        self.tracer: Tracer | None = None

    # --- what it serves

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def adapters(self) -> Adapters | None:
        return None

    @property
    def follows_grammars(self) -> bool:
        return True

    @property
    def states_wait(self) -> bool:
        return False

    # --- requests

    def add_request(self, request: Request) -> None:
        from tandem.engine.vllm.requests import VllmRequest, to_vllm

        self._check(request)
        theirs, _ = self._core.preprocess_add_request(to_vllm(request))
        if theirs.structured_output_request is not None:
            self._begin_grammar(request, theirs)
        self._core.add_request(theirs)
        self._live[request.request_id] = VllmRequest(request, theirs, request.num_initial_output_tokens)
        self._figures.totals.requests_started += 1

    def _check(self, request: Request) -> None:
        if request.request_id in self._live:
            raise InvalidRequest(f"request {request.request_id} is here already")
        if request.num_initial_output_tokens >= request.facts.sampling.max_tokens:
            raise InvalidRequest(
                f"max_tokens is {request.facts.sampling.max_tokens} and the request has {request.num_initial_output_tokens} output "
                "tokens already",
                "max_tokens",
            )
        if not request.num_tokens:
            raise InvalidRequest("the prompt is empty", "prompt")
        if request.num_tokens >= self._info.max_model_len:
            raise ContextLengthExceeded(
                f"{request.num_tokens} tokens leave no room to answer in a context of {self._info.max_model_len}"
            )

    def _begin_grammar(self, request: Request, theirs: Any) -> None:
        """vLLM would answer without a grammar that is wrong, and would begin a moved request's again, because it takes all tokens for the
        prompt."""
        manager, asked = self._core.structured_output_manager, theirs.structured_output_request
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

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self._end(request_ids, FinishReason.ABORT)

    def fail_request(self, request_id: str, error: TandemError) -> None:
        self._figures.totals.client_errors += request_id in self._live and isinstance(error, RequestError)
        self._end([request_id], FinishReason.ERROR)

    def _end(self, request_ids: Iterable[str], reason: FinishReason) -> None:
        ended = {each: live for each in request_ids if (live := self._live.pop(each, None)) is not None}
        if ended:
            self._core.abort_requests(list(ended))
        for live in ended.values():
            self._figures.ended(live, reason.value)

    def step(self) -> StepResult:
        began, core = self._clock(), self._core
        if not (core.scheduler.has_requests() or core.batch_queue):
            return StepResult([], False)
        core.scheduler.newest = None
        outputs, computed = core.step_fn()
        core.post_step(computed)
        ended, plan = self._clock(), core.scheduler.newest
        found = [each for batch in (outputs or {}).values() for each in batch.outputs]
        if plan is not None:
            self._planned(plan, began, ended)
        updates = [chunk for output in found if (chunk := self._chunk(output)) is not None]
        if plan is not None and self.tracer is not None:
            self._trace(self.tracer, plan, updates, began, ended)
        progressed = computed or bool(updates) or outputs is None
        return StepResult(updates, progressed, ask_again=not progressed and core.scheduler.has_requests())

    def _planned(self, plan: Any, began: float, ended: float) -> None:
        num_prompt = self._figures.planned(plan, self._live, began)
        if plan.total_num_scheduled_tokens and not num_prompt:
            self._figures.totals.decoded(1, ended - began)

    def _chunk(self, output: Any) -> TokenChunk | None:
        from tandem.engine.vllm.requests import REASONS, logprobs_of, prompt_logprobs_of

        live = self._live.get(output.request_id)
        if live is None:
            return None
        tokens, reason = output.new_token_ids, output.finish_reason
        if reason is not None and REASONS[reason] is FinishReason.ERROR:
            return self._failed(live)
        chunk = TokenChunk(output.request_id, live.num_outputs, tokens)
        live.num_outputs += len(tokens)
        self._figures.totals.output_tokens += len(tokens)
        if output.new_logprobs is not None:
            chunk.logprobs = logprobs_of(output.new_logprobs, live.ours.facts.sampling.logprobs or 0)
        if output.new_prompt_logprobs_tensors is not None:
            chunk.prompt_logprobs = prompt_logprobs_of(live, output.new_prompt_logprobs_tensors)
        if not live.is_answered:
            live.is_answered = True
            chunk.cached_tokens, chunk.queue_s = live.num_cached, live.queue_s
        if reason is not None:
            chunk.finish, chunk.preemptions = REASONS[reason], live.theirs.num_preemptions
            if chunk.finish is FinishReason.STOP and isinstance(output.stop_reason, int):
                chunk.stop_token = output.stop_reason
            del self._live[output.request_id]
            self._figures.ended(live, chunk.finish.value)
        return chunk

    def _failed(self, live: VllmRequest) -> TokenChunk:
        """vLLM gives no reason with a request that it failed. One that waits for its grammar failed because of that."""
        grammar = live.theirs.structured_output_request
        error: TandemError = InternalError("vLLM ended the request with an error")
        if grammar is not None and not live.is_admitted:
            error = InvalidRequest(f"vLLM does not take the grammar: {grammar.grammar}", "response_format")
            self._figures.totals.client_errors += 1
        del self._live[live.ours.request_id]
        self._figures.ended(live, FinishReason.ERROR.value)
        return TokenChunk.failed(live.ours.request_id, live.num_outputs, error.to_wire())

    def _trace(
        self, tracer: Tracer, plan: Any, updates: Sequence[TokenChunk], began: float, ended: float
    ) -> None:
        """vLLM plans, computes and books in one call, so a step's phases are not told apart."""
        step = SchedulerOutput(
            [],
            CachedRequestData(),
            plan.num_scheduled_tokens,
            plan.total_num_scheduled_tokens,
            {},
            set(plan.finished_req_ids),
            set(plan.preempted_req_ids or ()),
        )
        output = ModelOutput({update.request_id: update.token_ids for update in updates})
        tracer.on_step(step, output, ConnectorOutput(), StepTimes(began, began, ended, ended))

    def seconds_until_due(self) -> float | None:
        return None

    def turn_ended(self, job_id: str, request_id: str, called: list[str] | None) -> None: ...

    # --- idle time

    def use_idle_time(self) -> bool:
        return False

    @property
    def lora_in_check(self) -> str | None:
        return None

    def wind_down(self) -> None: ...

    # --- its cache

    @property
    def caches_prefixes(self) -> bool:
        return bool(self._core.vllm_config.cache_config.enable_prefix_caching)

    def tell_cache_events(self) -> None:
        self._desk.keeps = True

    def take_cache_events(self) -> Sequence[KVEvent]:
        events, self._desk.events = self._desk.events, []
        return events

    def reset_prefix_cache(self) -> None:
        """Running requests are computed again: vLLM forgets no block that is in use."""
        self._core.reset_prefix_cache(reset_running_requests=True)

    @property
    def has_forgotten(self) -> bool:
        return True

    # --- what it reports

    def stats(self) -> SchedulerStats:
        return self._figures.stats(self._live)

    def transfer_stats(self) -> TransferStats:
        return TransferStats()

    def trace_of(self, request_id: str) -> TransferTrace | None:
        return None

    def holds_blocks_of(self, request_id: str) -> bool:
        return False

    def shutdown(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._core.shutdown()
