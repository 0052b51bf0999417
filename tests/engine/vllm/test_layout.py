"""vLLM's cache in our words, whatever its layers keep. The classes here have the names and the fields of vLLM's."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.base.errors import ConfigurationError
from tandem.engine.cache.group_manager import AttentionKind
from tandem.engine.vllm.layout import VllmCache
from tandem.kvtransfer.protocol.cache_map import layout_of


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
