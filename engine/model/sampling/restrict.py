"""min_p, top_k and top_p, each as a lower bound on a token's logit.

A bound keeps ties: tokens with equal logits are all in or all out. So which tokens may be sampled depends on
nothing but the row itself, whatever else is in the batch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

# Enough of the most likely tokens that top_p is nearly always reached among them.
_CANDIDATES = 256


@dataclasses.dataclass(slots=True)
class Restriction:
    """Tokens with a logit below `bound` are out. `tokens`, when given, holds every token that is in."""

    bound: torch.Tensor  # [N, 1]
    values: torch.Tensor | None = None  # [N, C]
    tokens: torch.Tensor | None = None  # [N, C]


def restrict(
    scaled: torch.Tensor,  # [N, V] float32: logits over temperature
    top_k: npt.NDArray[np.int64],  # 0 is off
    top_p: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32],
) -> Restriction | None:
    """In this order: min_p, then top_k, then top_p of what is left. None: nothing is restricted."""
    vocab = scaled.shape[1]
    device = scaled.device
    limited_k, limited_p = (top_k > 0) & (top_k < vocab), top_p < 1.0
    if not (limited_k.any() or limited_p.any() or (min_p > 0).any()):
        return None
    bound = torch.full((len(top_k), 1), float("-inf"), device=device)
    if (min_p > 0).any():
        share = torch.from_numpy(min_p).to(device)[:, None]
        bound = scaled.amax(dim=1, keepdim=True) + share.log()  # log(0) leaves a row unbounded
    if not (limited_k.any() or limited_p.any()):
        return Restriction(bound)

    largest_k = int(top_k[limited_k].max()) if limited_k.any() else 0
    count = min(vocab, max(_CANDIDATES, largest_k + 1))
    if device.type != "cpu" or count > vocab // 4:
        count = vocab  # asking a device whether fewer were enough would wait for it
    restriction = _bound_by_rank(scaled, bound, top_k, top_p, count)
    if restriction is None:
        restriction = _bound_by_rank(scaled, bound, top_k, top_p, vocab)
        assert restriction is not None
    return restriction


def _bound_by_rank(
    scaled: torch.Tensor,
    bound: torch.Tensor,
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
    count: int,
) -> Restriction | None:
    """None when the `count` most likely tokens are not enough to know."""
    vocab = scaled.shape[1]
    device = scaled.device
    complete = count == vocab
    if complete:
        values, tokens = scaled.sort(dim=1, descending=True)
    else:
        values, tokens = scaled.topk(count, dim=1)
    limited_k = (top_k > 0) & (top_k < vocab)
    if limited_k.any():
        last = torch.from_numpy(np.where(limited_k, top_k, 1) - 1).to(device)[:, None]
        kth = values.gather(1, last)
        off = torch.from_numpy(~limited_k).to(device)[:, None]
        bound = torch.maximum(bound, kth.masked_fill(off, float("-inf")))
    if (top_p < 1.0).any():
        share = torch.from_numpy(top_p.astype(np.float64)).to(device)[:, None]
        total = scaled.masked_fill(scaled < bound, float("-inf")).logsumexp(dim=1, keepdim=True)
        probability = (values - total).double().exp_().masked_fill_(values < bound, 0)
        cumulative = probability.cumsum(dim=1)
        # A token is in while those before it have not reached the share; the first always is.
        inside = (cumulative - probability) < share
        inside[:, 0] = True
        smallest = values.masked_fill(~inside, float("inf")).amin(dim=1, keepdim=True)
        off = torch.from_numpy(top_p >= 1.0).to(device)[:, None]
        bound = torch.maximum(bound, smallest.masked_fill(off, float("-inf")))
    if complete:
        # Sorted tokens are no cheaper than the whole row.
        return Restriction(bound)
    # All that is in lies among the candidates exactly if their last is out.
    if not bool((values[:, -1:] < bound).all()):
        return None
    return Restriction(bound, values, tokens)
