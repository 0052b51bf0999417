"""The connectors that vLLM loads by this module's path: one in its scheduler, one in its worker. Both pass everything on to the halves of
Tandem's connector, which plan and carry out the transfers as for Tandem's own engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

from tandem.base.errors import ConfigurationError
from tandem.engine.vllm.handover import HANDOVERS, Handover
from tandem.kvtransfer.base import ConnectorMetadata, KVCacheMemory

NAME = "TandemConnector"


@dataclasses.dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # it is only known where vLLM is
    plan: ConnectorMetadata


class _Step:
    """vLLM's plan of a step, as `kvtransfer.base.ScheduledStep`."""

    def __init__(self, plan: Any) -> None:
        self.num_scheduled_tokens: dict[str, int] = plan.num_scheduled_tokens
        self.total_num_scheduled_tokens: int = plan.total_num_scheduled_tokens
        self.preempted_req_ids: set[str] = set(plan.preempted_req_ids or ())
        self._cached = plan.scheduled_cached_reqs

    def new_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        cached = self._cached
        if request_id in cached.resumed_req_ids or request_id not in cached.req_ids:
            return ()
        return cached.new_block_ids[cached.req_ids.index(request_id)] or ()


class TandemConnector(KVConnectorBase_V1):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        key = vllm_config.kv_transfer_config.kv_connector_extra_config["handover"]
        self._handover: Handover = HANDOVERS[key]

    # --- in the worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._handover.worker.register_kv_caches(_memory(self._handover, list(kv_caches.values())))

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """vLLM begins loads only after the forward pass. Here a destination is registered before it, so that the peer does not wait."""
        super().bind_connector_metadata(connector_metadata)
        worker = self._handover.worker
        worker.bind_connector_metadata(connector_metadata.plan)
        worker.handle_preemptions()
        worker.start_load_kv()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        self._handover.worker.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        sent, received, failed = self._handover.collect(finished_req_ids)
        return KVConnectorTransferResults(sent, received, failed)

    # --- in the scheduler

    def on_new_request(self, request: Any) -> None:
        if (view := self._handover.views.get(request.request_id)) is not None:
            self._handover.scheduler.on_new_request(view)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        view = self._handover.views.get(request.request_id)
        if view is None:
            return 0, False
        view.num_found = num_computed_tokens
        if view.skip_reading_prefix_cache:
            return 0, False
        return self._handover.scheduler.get_num_new_matched_tokens(view, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if (view := self._handover.views.get(request.request_id)) is not None:
            tables = blocks.get_block_ids()
            self._handover.scheduler.update_state_after_alloc(view, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(self._handover.scheduler.build_connector_meta(_Step(scheduler_output)))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        view = self._handover.views.pop(request.request_id, None)
        if view is None:
            return False, None
        return self._handover.scheduler.request_finished(view, [block_ids]), None

    def has_pending_push_work(self) -> bool:
        return self._handover.scheduler.has_pending_work()


def _memory(handover: Handover, caches: Sequence[Any]) -> KVCacheMemory:
    """vLLM's tensors, one for each layer, as one tensor in which a block's layers lie side by side. Within a layer's part of a block
    only vLLM knows what lies where: both nodes' caches have the same identity, so whole blocks are the same."""
    first, layers = caches[0], len(caches)
    if any(cache.dim() != 4 for cache in caches) or any(cache.shape != first.shape for cache in caches):
        raise ConfigurationError("vLLM keeps this model's KV in layers of several shapes, which are not handed over: serve it with --aggregated N")  # fmt: skip
    blocks, heads, tokens, numbers = first.shape
    of_layer = heads * tokens * numbers
    begins = [(cache.data_ptr() - first.data_ptr()) // cache.element_size() for cache in caches]
    if begins != [of_layer * i for i in range(layers)] or first.stride(0) != of_layer * layers:
        raise ConfigurationError(
            "vLLM's KV cache does not keep the layers of a block side by side: set pools.POOL.env to {VLLM_KV_CACHE_LAYOUT: BLHNC}, "
            "or to BLNHC, whichever its attention takes"
        )
    shape = (blocks, layers, 1, heads, tokens, numbers)
    strides = (of_layer * layers, of_layer, of_layer, tokens * numbers, numbers, 1)
    return KVCacheMemory(
        tensor=first.as_strided(shape, strides),
        model=handover.identity,
        num_layers=layers,
        num_groups=1,
        vocab_size=handover.vocab_size,
    )
