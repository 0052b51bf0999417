"""Layers that keep the same tokens share block tables, and every group has the same number of slots."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.cache.group_manager import AttentionKind
from tandem.engine.model.attention.layers import AttentionLayer, plan_cache
from tandem.engine.model.wide.stages import layers_of_stage


def layers(windows: list[int | None], heads: int = 2, dim: int = 8) -> tuple[AttentionLayer, ...]:
    return tuple(
        AttentionLayer(index=i, num_query_heads=4, num_kv_heads=heads, key_dim=dim, value_dim=dim, window=window)
        for i, window in enumerate(windows)
    )


def test_alike_layers_are_one_group() -> None:
    plan = plan_cache(layers([None] * 6), 16)
    (group,) = plan.groups
    assert group.kind is AttentionKind.FULL
    assert plan.slots == 6
    assert plan.shape(10) == (10, 6, 2, 2, 16, 8)


def test_a_hybrid_model_is_cut_into_groups_of_equal_size() -> None:
    """Five sliding layers for each full one, as in Gemma 3: a group of 22 would waste most of each full block."""
    windows = ([512] * 5 + [None]) * 4 + [512, 512]
    plan = plan_cache(layers(windows), 16)
    assert plan.slots == 4
    assert [group.kind for group in plan.groups] == [AttentionKind.FULL] + [AttentionKind.SLIDING] * 6
    assert [len(group.layers) for group in plan.groups] == [4, 4, 4, 4, 4, 3, 3]


def test_kinds_of_nearly_equal_size_are_not_cut() -> None:
    plan = plan_cache(layers([None, 64, None, 64, 64]), 16)
    assert [group.layers for group in plan.groups] == [(0, 2), (1, 3, 4)]
    assert plan.slots == 3


@given(st.lists(st.sampled_from([None, 64, 128]), min_size=1, max_size=40))
def test_every_layer_has_a_slot_of_its_own(windows: list[int | None]) -> None:
    plan = plan_cache(layers(windows), 16)
    places = set(zip(plan.group_of_layer, plan.slot_of_layer, strict=True))
    assert len(places) == len(windows)
    for index, window in enumerate(windows):
        group = plan.groups[plan.group_of_layer[index]]
        assert group.window == window
        assert group.layers[plan.slot_of_layer[index]] == index
        assert plan.slot_of_layer[index] < plan.slots


def test_a_window_bounds_the_blocks_of_a_long_request() -> None:
    plan = plan_cache(layers([64]), 16)
    assert plan.blocks_for(32, 8) == 2
    # 63 tokens that may still be read, 8 new ones, and a partly used block at the front.
    assert plan.blocks_for(10_000, 8) == 6


def test_layers_that_differ_in_size_share_the_largest() -> None:
    (small,) = layers([None], heads=2, dim=8)
    both = (small, *layers([None] * 2, heads=4, dim=6)[1:])
    plan = plan_cache(both, 16)
    assert (plan.num_kv_heads, plan.head_dim) == (4, 8)


@given(st.lists(st.sampled_from([None, 64, 128]), min_size=1, max_size=40), st.integers(1, 5))
def test_a_stage_has_its_layers_alone_and_as_few_slots_as_their_groups_allow(
    windows: list[int | None], stages: int
) -> None:
    plan = plan_cache(layers(windows), 16)
    kinds = [group.window for group in plan.groups]
    for stage in range(stages if len(windows) >= stages else 0):
        own = layers_of_stage(len(windows), stage, stages)
        share = plan.share_of(own)
        part = plan.of_share(share)
        for index, group in enumerate(plan.group_of_layer):
            slot = part.slot_of_layer[index]
            assert (slot < part.slots) == (index in own)
            if index in own:
                assert share.of_group[group][0] + slot == plan.slot_of_layer[index]
        assert sum(count for _, count in share.of_group) == len(own)
        of_kind = Counter(windows[index] for index in own)
        assert part.slots == max(-(-count // kinds.count(window)) for window, count in of_kind.items())
        assert (share.total, part.groups) == (plan.slots, plan.groups)
