"""vLLM's EngineCore as the engine of a node. Its steps run in the node's step thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tandem.base.errors import (
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    KVLoadFailed,
    NodeLost,
    RequestError,
    TandemError,
)
from tandem.engine.contract import StepResult
from tandem.engine.model.runner import ModelInfo
from tandem.engine.request import Request
from tandem.engine.scheduling.output import CachedRequestData, ModelOutput, SchedulerOutput
from tandem.engine.scheduling.state import SchedulerStats
from tandem.engine.tracing import StepTimes, Tracer
from tandem.engine.vllm.events import EventDesk
from tandem.engine.vllm.grammars import DeepExecutor, begin_grammar
from tandem.engine.vllm.handover import Handover, TransferView
from tandem.kvtransfer.base import ConnectorOutput, LoadFailure, TransferStats
from tandem.wire.kv_events import KVEvent
from tandem.wire.requests import TokenChunk
from tandem.wire.sampling import FinishReason
from tandem.wire.tracing import TransferTrace

if TYPE_CHECKING:
    from tandem.engine.vllm.adapters import VllmAdapters
    from tandem.engine.vllm.requests import VllmRequest

logger = logging.getLogger(__name__)

_NO_TRANSFERS = ConnectorOutput()
_LOOK_S = 1.0


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
        self._desk = EventDesk(group_of)
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
        self._check_ranks()
        if not (core.scheduler.has_requests() or core.batch_queue):
            return StepResult([], False)
        core.scheduler.newest = None
        try:
            outputs, computed = core.step_fn()
        except RuntimeError:  # what waits for a rank's answer is cancelled when the rank has ended
            self._check_ranks()
            raise
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

    def _check_ranks(self) -> None:
        """Raises NodeLost, so that requests go on elsewhere."""
        if getattr(self._core.model_executor, "is_failed", False):
            raise NodeLost("a process of vLLM's ranks has ended")

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
        """vLLM says only where it is asked that one of its ranks' processes has ended."""
        return _LOOK_S if hasattr(self._core.model_executor, "is_failed") else None

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
