"""vLLM's EngineCore as the engine of a node. Its steps run in the node's step thread.

`load` must run before anything else imports vLLM: some of its settings are environment variables that it reads when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.base.errors import (
    ConfigurationError,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    KVLoadFailed,
    RequestError,
    TandemError,
)
from tandem.base.progress import Report
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
from tandem.engine.vllm.grammars import DeepExecutor, begin_grammar
from tandem.engine.vllm.handover import Handover, TransferView
from tandem.engine.vllm.layout import VllmCache
from tandem.engine.vllm.settings import arguments, environment
from tandem.engine.wings import Connect
from tandem.kvtransfer.base import ConnectorOutput, LoadFailure, TransferStats
from tandem.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, ExtraKeys, KVEvent
from tandem.wire.requests import TokenChunk
from tandem.wire.sampling import FinishReason
from tandem.wire.tracing import TransferTrace

if TYPE_CHECKING:
    from tandem.engine.vllm.adapters import VllmAdapter, VllmAdapters
    from tandem.engine.vllm.requests import VllmRequest

logger = logging.getLogger(__name__)

_NO_TRANSFERS = ConnectorOutput()


def load(config: EngineConfig, model: ModelConfig, progress: Report, connect: Connect | None) -> VllmEngine:
    source = find_source(model.path)
    if source.gguf_file is not None:
        raise ConfigurationError(
            f"{source.name} is a GGUF file, and vLLM reads folders as transformers writes them: name such a folder with model.path"
        )
    for name, value in environment(model.device).items():
        os.environ.setdefault(name, value)
    adapters = _read_adapters(model, progress) if config.scheduler.max_loras else None
    progress("importing vLLM", 0.0)
    from vllm.config import KVEventsConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMError
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from tandem.engine.vllm.figures import watch
    from tandem.engine.vllm.requests import GRAMMARS

    progress("reading the weights to know them again", 0.0)
    content = content_of(source)
    progress("loading the model into vLLM", 0.1)
    try:
        made = EngineArgs(
            **arguments(config, model, source),
            structured_outputs_config={"backend": GRAMMARS},
            kv_events_config=KVEventsConfig(enable_kv_cache_events=config.cache.prefix_caching, publisher="null"),
        ).create_engine_config()
        _check_experts(made)
        # Its KV, its numbers and its noise are not those of another engine, so no request goes on there.
        identity = hashlib.sha256(f"vllm {content.digest}".encode()).hexdigest()
        handover = _handover(made, identity, connect) if connect is not None else None
        core = EngineCore(made, Executor.get_class(made), log_stats=False)
        watch(core.scheduler)
    except (VLLMError, ValueError, TypeError, NotImplementedError, OSError) as error:
        raise ConfigurationError(f"vLLM does not load {source.name}: {error}") from error
    book = None
    if adapters is not None:
        from tandem.engine.vllm.adapters import VllmAdapters

        book = VllmAdapters(core, model.max_lora_rank)
        book.serve(adapters)
    progress("ready", 1.0)
    layout = VllmCache(core.scheduler.kv_cache_config)
    info = _described(core, source, identity, content.tokenizer, layout)
    return VllmEngine(core, info, layout.group_of, handover, book)


def _read_adapters(model: ModelConfig, progress: Report) -> list[VllmAdapter]:
    """Before the model, which takes minutes: an adapter that cannot be read is known then."""
    from tandem.engine.vllm.adapters import read_adapter

    progress("reading the adapters", 0.0)
    return [read_adapter(name, Path(folder), model.max_lora_rank) for name, folder in model.adapters.items()]


def _check_experts(made: Any) -> None:
    if made.device_config.device_type == "cpu" and made.lora_config is not None and made.model_config.is_moe:
        raise ConfigurationError(
            "vLLM computes experts with Triton where adapters are served, and CPUs lack it: set scheduler.max_loras to 0, or "
            "model.engine to tandem"
        )


def _handover(made: Any, identity: str, connect: Connect) -> Handover:
    """Tells vLLM where to find its two connectors, which meet the halves of the node's in this process."""
    from vllm.config import KVTransferConfig

    from tandem.engine.vllm import connector

    model, cache = made.model_config, made.cache_config
    if made.parallel_config.world_size > 1:
        raise ConfigurationError(
            f"vLLM runs {made.parallel_config.world_size} ranks, which hand nothing over: serve with nodes that do both (--aggregated N)"
        )
    inside = os.environ.get("VLLM_KV_CACHE_LAYOUT", "")
    if made.device_config.device_type == "cpu":
        # vLLM's attention on CPUs finds a block by its stride, so the layers of one may lie side by side.
        cache.kv_cache_layout = "BLHNC"
        inside = _on_cpus(made)
    handover = Handover(connect.halves, fails=connect.fails)
    handover.identity = f"{identity} {_as_computed(model)} {inside}"
    handover.vocab_size = model.get_vocab_size()
    made.kv_transfer_config = KVTransferConfig(
        kv_connector=connector.NAME,
        kv_connector_module_path=connector.__name__,
        kv_connector_extra_config={"handover": handover.key},
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    return handover


def _as_computed(model: Any) -> str:
    """What `engine_args` made of the model's files: one pool may have other arguments than the other."""
    config = {name: value for name, value in model.hf_config.to_dict().items() if name != "_name_or_path"}
    said = json.dumps([str(model.dtype), model.quantization, config], default=str, sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _on_cpus(made: Any) -> str:
    """Returns what decides how the inside of a block is kept."""
    model, cache = made.model_config, made.cache_config
    if model.use_mla:
        from tandem.engine.vllm.latents import write_by_strides

        return write_by_strides(made)
    from vllm.v1.attention.backends import cpu_attn

    return str(cpu_attn._get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype))


def _described(core: Any, source: ModelSource, content: str, tokenizer: str, layout: VllmCache) -> ModelInfo:
    config, caches = core.vllm_config, core.scheduler.kv_cache_config
    model = config.model_config
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
        num_layers=layout.num_layers,
        num_kv_heads=getattr(spec, "num_kv_heads", 0),
        head_dim=getattr(spec, "head_size", 0),
        groups=tuple(layout.groups),
        num_blocks=layout.num_blocks,
    )


class _EventDesk:
    """Stands where vLLM has the publisher of its cache's events."""

    def __init__(self, group_of: Callable[[int], int]) -> None:
        self.events: list[KVEvent] = []
        self.keeps = False
        self._group_of = group_of

    def publish(self, batch: Any) -> None:
        if self.keeps:
            self.events += [_event(event, self._group_of) for event in batch.events]

    def shutdown(self) -> None: ...


def _event(event: Any, group_of: Callable[[int], int]) -> KVEvent:
    group = group_of(getattr(event, "group_idx", None) or 0) or None
    match type(event).__name__:
        case "BlockStored":
            return BlockStored(
                [_hash(each) for each in event.block_hashes],
                _hash(event.parent_block_hash) if event.parent_block_hash is not None else None,
                event.token_ids,
                event.block_size,
                medium=event.medium,
                lora_name=event.lora_name,
                extra_keys=_extra_keys(event),
                group_idx=group,
            )
        case "BlockRemoved":
            return BlockRemoved([_hash(each) for each in event.block_hashes], event.medium, group)
        case "AllBlocksCleared":
            return AllBlocksCleared()
        case other:
            raise InternalError(f"vLLM's cache reports an event of an unknown kind, {other}")


def _extra_keys(event: Any) -> list[ExtraKeys | None] | None:
    """vLLM does not say what a key is; an adapter's identity comes first."""
    keys: list[ExtraKeys | None] | None = event.extra_keys
    if keys is None or event.lora_name is None:
        return keys
    return [(f"lora:{each[0]}", *each[1:]) if each else each for each in keys]


def _hash(value: Any) -> bytes:
    return value if isinstance(value, bytes) else int(value).to_bytes(8, "big")


class VllmEngine:
    """A `NodeEngine`."""

    def __init__(
        self,
        core: Any,
        info: ModelInfo,
        group_of: Callable[[int], int],
        handover: Handover | None = None,
        adapters: VllmAdapters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from tandem.engine.vllm.figures import VllmFigures
        from tandem.engine.vllm.seeds import seed_every_step

        self._core = core
        core.structured_output_manager.executor = DeepExecutor()
        self.info = info
        self._clock = clock
        self._handover = handover  # None: no peers
        self.adapters = adapters
        self._live: dict[str, VllmRequest] = {}
        self._desk = _EventDesk(group_of)
        core.scheduler.kv_event_publisher = self._desk
        self._figures = VllmFigures(core.scheduler, info)
        self._is_closed = False
        seed_every_step(core, self._live)
        self.tracer: Tracer | None = None

    # --- what it serves

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
        lora = request.facts.lora
        adapter = self.adapters.request_of(lora) if self.adapters is not None and lora is not None else None
        theirs, _ = self._core.preprocess_add_request(to_vllm(request, adapter))
        if theirs.structured_output_request is not None:
            begin_grammar(self._core.structured_output_manager, request, theirs)
        if self._handover is not None and request.transfer is not None:
            self._handover.views[request.request_id] = TransferView(request, theirs)
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
        if request.num_tokens >= self.info.max_model_len:
            raise ContextLengthExceeded(
                f"{request.num_tokens} tokens leave no room to answer in a context of {self.info.max_model_len}"
            )

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
        transfers = self._handover.take() if self._handover is not None else _NO_TRANSFERS
        ended, plan = self._clock(), core.scheduler.newest
        found = [each for batch in (outputs or {}).values() for each in batch.outputs]
        if plan is not None:
            self._planned(plan, began, ended)
        updates = [chunk for output in found if (chunk := self._chunk(output)) is not None]
        if not transfers.is_empty:
            updates += self._transferred(transfers)
        if plan is not None and self.tracer is not None:
            self._trace(self.tracer, plan, updates, transfers, began, ended)
        progressed = computed or bool(updates) or outputs is None or not transfers.is_empty
        return StepResult(updates, progressed, ask_again=not progressed and self._is_due())

    def _is_due(self) -> bool:
        """Whether another step may do more though nothing arrives. Requests that wait for a peer are woken by the connector."""
        if self._handover is not None and self._handover.scheduler.has_pending_work():
            return True
        return any(live.theirs.status.name != "WAITING_FOR_REMOTE_KVS" for live in self._live.values())

    def _transferred(self, transfers: ConnectorOutput) -> list[TokenChunk]:
        if transfers.distrusted:
            logger.error("nothing cached so far is used again: %s", transfers.distrusted)
            self.reset_prefix_cache()
        updates = []
        for request_id, handoff in transfers.finished_recving.items():
            live = self._live.get(request_id)
            if live is not None and handoff.first_token is not None:
                updates.append(self._received(live, handoff.first_token))
        for request_id, failure in transfers.failed_recving.items():
            if (live := self._live.get(request_id)) is not None:
                updates += self._not_received(live, failure)
        for request_id in transfers.unwanted_sending:
            if (live := self._live.get(request_id)) is not None:
                updates.append(TokenChunk(request_id, live.num_outputs, [], FinishReason.ABORT))
                self.abort_requests([request_id])
        return updates

    def _received(self, live: VllmRequest, token: int) -> TokenChunk:
        """The KV of all its tokens is here. vLLM goes on from the peer's token as if the prompt ended with it."""
        theirs, sampling, request_id = live.theirs, live.ours.facts.sampling, live.ours.request_id
        view = self._handover.views.get(request_id) if self._handover is not None else None
        local = view.num_found if view is not None else 0
        live.num_received = theirs.num_tokens - local
        live.num_cached = min(local, live.ours.num_prompt_tokens)
        chunk = TokenChunk(request_id, live.num_outputs, [token], cached_tokens=live.num_cached)
        totals = self._figures.totals
        totals.prompt_tokens_received += max(0, min(theirs.num_tokens, live.ours.num_prompt_tokens) - local)
        totals.output_tokens += 1
        live.is_answered = True
        live.num_outputs += 1
        theirs.prompt_token_ids.append(token)
        theirs._all_token_ids.append(token)
        theirs.num_prompt_tokens += 1
        theirs.max_tokens -= 1
        theirs.update_block_hashes()
        if (grammar := theirs.structured_output_request) is not None:
            grammar.grammar.accept_tokens(request_id, [token])
        params = theirs.sampling_params
        params.min_tokens = max(0, params.min_tokens - 1)
        if token in params.stop_token_ids and live.num_outputs >= sampling.min_tokens:
            chunk.finish, chunk.stop_token = FinishReason.STOP, token
        elif live.num_outputs >= sampling.max_tokens or theirs.num_tokens >= self.info.max_model_len:
            chunk.finish = FinishReason.LENGTH
        if chunk.finish is not None:
            self._end([request_id], chunk.finish)
        return chunk

    def _not_received(self, live: VllmRequest, failure: LoadFailure) -> list[TokenChunk]:
        """vLLM computes the prompt itself, unless the operator wants the request to fail."""
        self._figures.totals.loads_failed += 1
        if self._handover is None or not self._handover.fails:
            return []
        request_id = live.ours.request_id
        error = KVLoadFailed(f"the prompt's KV did not arrive: {failure.reason}")
        self._end([request_id], FinishReason.ERROR)
        return [TokenChunk.failed(request_id, live.num_outputs, error.to_wire())]

    def _planned(self, plan: Any, began: float, ended: float) -> None:
        num_prompt = self._figures.planned(plan, self._live, began)
        if self._handover is not None and num_prompt:
            self._handover.scheduler.step_took(num_prompt, ended - began)
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
        self,
        tracer: Tracer,
        plan: Any,
        updates: Sequence[TokenChunk],
        transfers: ConnectorOutput,
        began: float,
        ended: float,
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
        tracer.on_step(step, output, transfers, StepTimes(began, began, ended, ended))

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
        if self._handover is not None:
            self._handover.scheduler.reset_cache()
        try:
            self._core.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError:
            # Blocks that are being received or sent are in use all the same: then each block loses its name.
            self._core.scheduler.kv_cache_manager.evict_blocks(set(range(self.info.num_blocks)))

    @property
    def has_forgotten(self) -> bool:
        return True

    # --- what it reports

    def stats(self) -> SchedulerStats:
        quarantined = self._handover.quarantined if self._handover is not None else 0
        return self._figures.stats(self._live, quarantined)

    @property
    def peer_endpoint(self) -> str:
        return self._handover.worker.peer_endpoint if self._handover is not None else ""

    @property
    def tier_endpoint(self) -> str:
        return ""

    def transfer_stats(self) -> TransferStats:
        return self._handover.worker.stats() if self._handover is not None else TransferStats()

    def trace_of(self, request_id: str) -> TransferTrace | None:
        return self._handover.worker.trace_of(request_id) if self._handover is not None else None

    def holds_blocks_of(self, request_id: str) -> bool:
        return request_id in self._core.scheduler.requests and request_id not in self._live

    def shutdown(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._handover is not None:
                self._handover.close()
        finally:
            self._core.shutdown()
