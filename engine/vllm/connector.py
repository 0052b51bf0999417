"""The connectors that vLLM loads by this module's path: one in its scheduler, one in its worker. Both pass everything on to the halves of
Tandem's connector, which plan and carry out the transfers as for Tandem's own engine.

Where ranks are other processes, their connectors only register their caches. All else happens in the scheduler's process: a step's
transfers start when it is planned, and are collected when all ranks have computed it (`RanksOutput`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

from tandem.engine.vllm.handover import HANDOVERS, Handover
from tandem.engine.vllm.latents import write_by_strides
from tandem.engine.vllm.layout import RankOf
from tandem.engine.vllm.ranks import RankHandover
from tandem.kvtransfer.base import ConnectorMetadata

NAME = "TandemConnector"


@dataclasses.dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # it is only known where vLLM is
    plan: ConnectorMetadata | None  # None: the transfers of this step have started already


class _Step:
    """vLLM's plan of a step, as `kvtransfer.base.ScheduledStep`."""

    def __init__(self, plan: Any, tables: Callable[[Sequence[Sequence[int]]], list[list[int]]]) -> None:
        self._tables = tables
        self.num_scheduled_tokens: dict[str, int] = plan.num_scheduled_tokens
        self.total_num_scheduled_tokens: int = plan.total_num_scheduled_tokens
        self.preempted_req_ids: set[str] = set(plan.preempted_req_ids or ())
        self._cached = plan.scheduled_cached_reqs

    def new_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        cached = self._cached
        if request_id in cached.resumed_req_ids or request_id not in cached.req_ids:
            return ()
        new = cached.new_block_ids[cached.req_ids.index(request_id)]
        return self._tables(new) if new is not None else ()


class TandemConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        told = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._here: Handover | RankHandover
        if role is KVConnectorRole.WORKER and told["ranks"] > 1:
            of = RankOf(get_tensor_model_parallel_rank(), told["ranks"], told["heads"])
            self._here = RankHandover(told["handover"], kv_cache_config, of)
            if vllm_config.model_config.use_mla and vllm_config.device_config.device_type == "cpu":
                write_by_strides(vllm_config)
            return
        self._here = self._handover = HANDOVERS[told["handover"]]
        self._handover.begin(kv_cache_config)

    # --- in the worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._here.register(next(iter(kv_caches.values())))

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """vLLM begins loads only after the forward pass. Here a destination is registered before it, so that the peer does not wait."""
        super().bind_connector_metadata(connector_metadata)
        if connector_metadata.plan is not None:
            self._here.start_step(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        self._here.save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        sent, received, failed = self._here.collect(finished_req_ids)
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

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A handoff brings blocks of every group, so vLLM must zero none of them while they arrive."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if (view := self._handover.views.get(request.request_id)) is not None:
            tables = self._handover.layout.tables(blocks.get_block_ids())
            self._handover.scheduler.update_state_after_alloc(view, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        step = _Step(scheduler_output, self._handover.layout.tables)
        plan = self._handover.scheduler.build_connector_meta(step)
        if self._handover.has_ranks:
            self._handover.start_step(plan)
            return StepMetadata(None)
        return StepMetadata(plan)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        view = self._handover.views.pop(request.request_id, None)
        if view is None:
            return False, None
        tables = self._handover.layout.tables(block_ids)
        return self._handover.scheduler.request_finished(view, tables), None

    def has_pending_push_work(self) -> bool:
        return self._handover.scheduler.has_pending_work()


class RanksOutput:
    """Stands where vLLM joins the outputs of its ranks: all of them have then computed the step."""

    def __init__(self, handover: Handover) -> None:
        self._handover = handover

    def aggregate(self, outputs: list[Any], output_rank: int = 0) -> Any:
        output = outputs[output_rank]
        if output is not None:  # else they have computed, and are yet to sample
            self._handover.save()
            sent, received, failed = self._handover.collect(set())
            output.kv_connector_output = KVConnectorOutput(sent, received, failed_recving=failed)
        return output
