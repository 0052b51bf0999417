"""Log-probabilities as clients see them: of the model's own distribution, before penalties and temperature."""

from __future__ import annotations

import torch

from wire.sampling import TokenLogprobs

# Rows converted to float32 at once: a long prompt's logits take hundreds of megabytes already.
_ROWS = 128


def token_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
    """For rows [N, V] and the token [N] that stands after each."""
    result: list[TokenLogprobs] = []
    for start in range(0, logits.shape[0], _ROWS):
        result.extend(_some(logits[start : start + _ROWS].float(), chosen[start : start + _ROWS], num_top))
    return result


def _some(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
    total = logits.logsumexp(dim=1, keepdim=True)
    own = logits.gather(1, chosen[:, None])
    ranks = (logits > own).sum(dim=1).add_(1).tolist()
    own_values = (own - total).squeeze(1).tolist()
    tokens = chosen.tolist()
    num_top = min(num_top, logits.shape[1])
    if num_top == 0:
        return [TokenLogprobs(*row) for row in zip(tokens, own_values, ranks, strict=True)]
    top_values, top_tokens = logits.topk(num_top, dim=1)
    top_values -= total
    return [
        TokenLogprobs(token, value, rank, list(zip(best, values, strict=True)))
        for token, value, rank, best, values in zip(
            tokens, own_values, ranks, top_tokens.tolist(), top_values.tolist(), strict=True
        )
    ]
