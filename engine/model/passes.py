"""A step whose prompts want logits at every position, cut into passes: a row of logits is as long as the vocabulary,
and a whole chunk of such rows would take more memory than the model."""

from __future__ import annotations

from tandem.engine.model.runner import LayerHooks
from tandem.engine.model.states import RequestRows

# Rows of logits in one pass, beyond those that are sampled from.
LOGIT_ROWS = 256


def cut_for_logits(
    requests: RequestRows, num_scheduled: dict[str, int], every_row: set[int]
) -> list[dict[str, int]]:
    """How many tokens of whom each pass computes. `every_row` are rows of requests whose tokens all want logits.

    What those have too much goes first, piece by piece; everything else, and the last token of every request, is in the last
    pass. That a prompt's chunk is cut anywhere changes nothing about its result.
    """
    wanting = [req_id for req_id in num_scheduled if requests.row(req_id) in every_row] if every_row else []
    share = max(1, LOGIT_ROWS // max(1, len(wanting)))
    passes: list[dict[str, int]] = []
    rest = dict(num_scheduled)
    for req_id in wanting:
        while rest[req_id] > share:
            count = min(LOGIT_ROWS, rest[req_id] - share)
            passes.append({req_id: count})
            rest[req_id] -= count
    return [*passes, rest]


class _Loads:
    """Layers are waited for before the first pass reads them."""

    def __init__(self, hooks: LayerHooks) -> None:
        self._hooks = hooks

    def wait_for_layer_load(self, layer: int) -> None:
        self._hooks.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        pass


class _Saves:
    """A layer of the step is written when the last pass has written it."""

    def __init__(self, hooks: LayerHooks) -> None:
        self._hooks = hooks

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int) -> None:
        self._hooks.save_kv_layer(layer)


def hooks_of_pass(hooks: LayerHooks | None, first: bool, last: bool) -> LayerHooks | None:
    if hooks is None or (first and last):
        return hooks
    if first:
        return _Loads(hooks)
    return _Saves(hooks) if last else None
