"""What vLLM hears of transfers, and when."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engine.request import Request
from tandem.engine.vllm.handover import HANDOVERS, Handover, TransferView
from tandem.engine.wings import Connect
from tandem.kvtransfer.base import (
    BlockIds,
    ConnectorMetadata,
    ConnectorOutput,
    Handoff,
    LoadFailure,
    ScheduledStep,
    SchedulerConnector,
    TransferRequest,
    WorkerConnector,
)
from tandem.kvtransfer.memory import KVCacheMemory
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams
from tests.engine.vllm.test_layout import FullAttentionSpec, cache_config, layers


class Plans(SchedulerConnector):
    def __init__(self) -> None:
        self.told: list[ConnectorOutput] = []

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int
    ) -> None: ...

    def build_connector_meta(self, step: ScheduledStep) -> ConnectorMetadata:
        return ConnectorMetadata()

    def update_connector_output(self, output: ConnectorOutput) -> None:
        self.told.append(output)


class Moves(WorkerConnector):
    def __init__(self) -> None:
        self.outputs: list[ConnectorOutput] = []
        self.is_closed = False

    def register_kv_caches(self, memory: KVCacheMemory) -> None: ...

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> ConnectorOutput:
        return self.outputs.pop(0) if self.outputs else ConnectorOutput()

    def shutdown(self) -> None:
        self.is_closed = True


@pytest.fixture
def handover() -> Handover:
    made = Handover(Connect(lambda groups, lines: (Plans(), Moves()), fails=False))
    made.begin(cache_config(layers(FullAttentionSpec(32), 2)))
    return made


def view(tokens: Sequence[int], computed: int = 0) -> TransferView:
    ours = Request("r", RequestFacts(prompt_token_ids=list(tokens), sampling=SamplingParams()))
    theirs: Any = SimpleNamespace(
        _all_token_ids=list(tokens), num_computed_tokens=computed, skip_reading_prefix_cache=False
    )
    return TransferView(ours, theirs)


def comes(handover: Handover, **fields: Any) -> None:
    moves = handover.worker
    assert isinstance(moves, Moves)
    moves.outputs.append(ConnectorOutput(**fields))


def test_what_is_sent_and_what_has_arrived_is_passed_on(handover: Handover) -> None:
    handover.views["r"] = view(range(10))
    comes(handover, finished_sending={"s"}, finished_recving={"r": Handoff(7, 10)})
    assert handover.collect(set()) == ({"s"}, {"r"}, set())
    assert handover.take().finished_recving == {"r": Handoff(7, 10)}
    assert handover.take().is_empty
    plans = handover.scheduler
    assert isinstance(plans, Plans)
    assert len(plans.told) == 1


def test_kv_of_another_number_of_tokens_has_failed(handover: Handover) -> None:
    handover.views["r"] = view(range(10))
    comes(handover, finished_recving={"r": Handoff(7, 9)})
    assert handover.collect(set()) == (set(), {"r"}, {"r"})
    assert "KV for 9 tokens came" in handover.take().failed_recving["r"].reason


def test_a_failed_load_is_heard_of_when_no_peer_can_write_any_more(handover: Handover) -> None:
    comes(
        handover,
        failed_recving={"r": LoadFailure("late", unsafe_blocks=frozenset({3, 4})), "safe": LoadFailure("refused")},
    )
    assert handover.collect(set()) == (set(), {"safe"}, {"safe"})
    assert handover.quarantined == 2
    comes(handover, released_blocks={3, 99})
    assert handover.collect(set()) == (set(), set(), set())
    comes(handover, released_blocks={4})
    assert handover.collect(set()) == (set(), {"r"}, {"r"})
    assert handover.quarantined == 0
    assert handover.collect(set()) == (set(), set(), set()), "each load is named once"


def test_tokens_found_here_count_as_computed_before_vllm_counts_them() -> None:
    seen = view(range(100))
    assert seen.num_computed_tokens == 0
    seen.num_found = 64
    assert seen.num_computed_tokens == 64
    assert (seen.num_tokens, seen.num_prompt_tokens, list(seen.output_token_ids)) == (100, 100, [])


def test_it_is_found_by_its_key_until_it_is_closed(handover: Handover) -> None:
    assert HANDOVERS[handover.key] is handover
    handover.close()
    assert handover.key not in HANDOVERS
    moves = handover.worker
    assert isinstance(moves, Moves)
    assert moves.is_closed
