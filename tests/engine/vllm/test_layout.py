"""vLLM's cache in our words, whatever its layers keep. The classes here have the names and the fields of vLLM's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.base.errors import ConfigurationError
from tandem.engine.cache.group_manager import AttentionKind
from tandem.engine.request import Request
from tandem.engine.vllm.handover import HANDOVERS, Handover, TransferView
from tandem.engine.vllm.layout import VllmCache
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
from tandem.kvtransfer.protocol.cache_map import layout_of
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int
    sliding_window: int | None = None  # where every token is kept all the same


@dataclasses.dataclass(frozen=True)
class SlidingWindowSpec:
    block_size: int
    sliding_window: int


@dataclasses.dataclass(frozen=True)
class MambaSpec:
    block_size: int
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0


@dataclasses.dataclass(frozen=True)
class CircularBufferSpec:
    block_size: int


@dataclasses.dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    block_size: int
    kv_cache_specs: dict[str, Any]


_numbers = itertools.count()


def layers(spec: Any, count: int) -> Any:
    return SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{next(_numbers)}" for _ in range(count)])


def cache_config(*groups: Any, blocks: int = 6, stride: int = 128) -> Any:
    tensor = SimpleNamespace(block_stride=stride, size=stride * blocks)
    return SimpleNamespace(kv_cache_groups=list(groups), num_blocks=blocks, kv_cache_tensors=[tensor for _ in groups])


def test_each_group_has_its_kind_and_its_layers() -> None:
    windows = SlidingWindowSpec(32, 96)
    found = VllmCache(cache_config(layers(windows, 2), layers(FullAttentionSpec(32), 1)))
    found.check()
    assert [(group.kind, group.layers, group.window) for group in found.groups] == [
        (AttentionKind.SLIDING, (0, 1), 96),
        (AttentionKind.FULL, (2,), None),
    ]
    assert found.tables(([0, 3], [1, 2])) == [[0, 3], [1, 2]]


def test_a_window_that_keeps_every_token_is_full_attention() -> None:
    (group,) = VllmCache(cache_config(layers(FullAttentionSpec(32, sliding_window=96), 2))).groups
    assert group.keeps_every_token


def test_layers_of_several_shapes_are_one_group() -> None:
    shapes = UniformTypeKVCacheSpecs(32, {"a": SlidingWindowSpec(32, 64), "b": SlidingWindowSpec(32, 64)})
    (group,) = VllmCache(cache_config(layers(shapes, 2))).groups
    assert (group.window, group.layers) == (64, (0, 1))


def test_all_recurrent_states_are_the_last_group() -> None:
    state = MambaSpec(4096)
    found = VllmCache(cache_config(layers(state, 1), layers(FullAttentionSpec(32), 1), layers(state, 1)))
    found.check()
    assert [group.blocks_per_request for group in found.groups] == [0, 2]
    assert found.groups[1].layers == (0, 2)
    assert found.block_size == 32
    assert found.tables(([7], [1, 2, 3], [9])) == [[1, 2, 3], [7, 9]]
    assert [found.group_of(theirs) for theirs in range(3)] == [1, 0, 1]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([layers(CircularBufferSpec(32), 1)], "KV as CircularBufferSpec, which is not handed over"),
        (
            [layers(FullAttentionSpec(32), 1), layers(FullAttentionSpec(64), 1)],
            "hold 32 or 64 tokens, and those of one size",
        ),
        ([layers(MambaSpec(4096), 1)], "hold no tokens"),
        ([layers(FullAttentionSpec(32), 1), layers(MambaSpec(32, "align"), 1)], r"set cache\.prefix_caching to false"),
    ],
)
def test_what_is_not_handed_over_is_refused_with_the_reason(groups: list[Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        VllmCache(cache_config(*groups)).check()


def test_a_block_is_one_run_of_bytes() -> None:
    config = cache_config(layers(SlidingWindowSpec(32, 96), 2), layers(FullAttentionSpec(32), 1))
    allocation = torch.arange(6 * 128, dtype=torch.int64).to(torch.int8)
    of_a_layer = allocation.as_strided((6, 16), (128, 1), 16).view(torch.float32)
    memory = VllmCache(config).memory(of_a_layer, "content", 100)
    assert (memory.num_blocks, memory.block_bytes, memory.block_size) == (6, 128, 32)
    assert (memory.num_groups, memory.num_layers, memory.has_windows) == (2, 3, True)
    assert bytes(memory.tensor[2].flatten().tolist()) == bytes(allocation[256:384].view(torch.uint8).tolist())
    assert layout_of(memory) == "slot,kv,head,token,dim"
    other = VllmCache(cache_config(layers(FullAttentionSpec(32), 3))).memory(of_a_layer, "content", 100)
    assert other.model != memory.model, "nodes whose layers keep other things do not pair"


def test_layers_that_lie_apart_are_refused_with_what_would_be_right() -> None:
    config = cache_config(layers(FullAttentionSpec(32), 2))
    config.kv_cache_tensors[0].block_stride = 64
    with pytest.raises(ConfigurationError, match=r"pools\.POOL\.env to \{VLLM_KV_CACHE_LAYOUT: BLHNC\}"):
        VllmCache(config).memory(torch.zeros(6, 128, dtype=torch.int8), "content", 100)


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
    made = Handover(lambda groups: (Plans(), Moves()), fails=False)
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
