"""Log-probabilities for clients, of the model's own distribution: before penalties and temperature."""

from __future__ import annotations

import torch

from tandem.engine.model.sampling.row_sums import row_sums
from tandem.engine.model.staging import HostCopy
from tandem.wire.sampling import TokenLogprobs

# How many rows are converted to float32 at once: a long prompt's logits already take hundreds of megabytes.
_ROWS = 128


class ComputedLogprobs:
    """Log-probabilities that the device computes and copies to the host; `read` waits for them."""

    def __init__(self, logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> None:
        """For logits [N, V] and the token [N] chosen by each row. A token below 0 stands for none; the caller does not report it."""
        self._parts: list[list[HostCopy]] = []
        for start in range(0, logits.shape[0], _ROWS):
            rows = slice(start, start + _ROWS)
            self._parts.append([HostCopy(found) for found in _some(logits[rows].float(), chosen[rows], num_top)])

    def read(self) -> list[TokenLogprobs]:
        result: list[TokenLogprobs] = []
        for part in self._parts:
            tokens, values, ranks, *top = (copy.read().tolist() for copy in part)
            if not top:
                result.extend(TokenLogprobs(*row) for row in zip(tokens, values, ranks, strict=True))
                continue
            result.extend(
                TokenLogprobs(token, value, rank, list(zip(best, of_best, strict=True)))
                for token, value, rank, best, of_best in zip(tokens, values, ranks, *top, strict=True)
            )
        return result


def _some(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> list[torch.Tensor]:
    """Returns the chosen tokens, their log-probabilities and ranks; with `num_top` also the most likely tokens and theirs."""
    largest = logits.amax(dim=1, keepdim=True)
    total = largest + row_sums((logits - largest).exp_())[:, None].log_()
    own = logits.gather(1, chosen.clamp(min=0)[:, None])
    ranks = (logits > own).sum(dim=1).add_(1)
    found = [chosen, (own - total).squeeze(1), ranks]
    num_top = min(num_top, logits.shape[1])
    if num_top:
        values, tokens = logits.topk(num_top, dim=1)
        found += [tokens, values - total]
    return found
