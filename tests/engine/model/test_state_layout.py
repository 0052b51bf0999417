"""Where states lie in a request's blocks: what was saved is loaded, and nothing else is touched."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.model.attention.layers import AttentionLayer, plan_cache
from tandem.engine.model.recurrent.layout import LayerStates, State, StateLayout

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@given(
    shapes=st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=5),
    attends=st.booleans(),
    block_size=st.sampled_from([1, 4, 16]),
    cache=DTYPES,
    requests=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_states_of_requests_lie_side_by_side(
    shapes: list[tuple[tuple[int, ...], torch.dtype]],
    attends: bool,
    block_size: int,
    cache: torch.dtype,
    requests: int,
    seed: int,
) -> None:
    layout = StateLayout.of(tuple(State(layer, "conv", 0, shape, dtype) for layer, (shape, dtype) in enumerate(shapes)))
    layers = (AttentionLayer(9, 2, 1, 4, 4, None),) if attends else ()
    plan = plan_cache(layers, block_size, layout, cache)
    count = plan.state_blocks
    assert count > 0
    assert plan.all_groups[-1] == plan.states
    chance = random.Random(seed)
    blocks = chance.sample(range(1, 2 + requests * count), requests * count)
    tensor = torch.full(plan.shape(2 + requests * count), 7.0, dtype=cache)
    (untouched,) = set(range(1, 2 + requests * count)) - set(blocks)
    table = torch.tensor(blocks).view(requests, count)
    store = LayerStates(tensor, layout)
    saved = {}
    for state in layout.states:  # layer by layer, as a model does it
        saved[state.key] = torch.rand(requests, *state.shape).to(state.dtype)
        store.save((state,), table, {state.key: saved[state.key]})
    for state in layout.states:
        for request in range(requests):  # of some requests, in any order
            found = store.load((state,), table[request : request + 1])[state.key]
            assert torch.equal(found[0], saved[state.key][request])
    everything = store.load(layout.states, table)
    assert all(torch.equal(everything[key], value) for key, value in saved.items())
    assert bool((tensor[[0, untouched]] == 7).all())
