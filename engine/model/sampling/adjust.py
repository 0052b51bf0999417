"""What changes logits before a token is chosen: bans, biases, penalties. Penalties see all history so far."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.model.staging import to_device
from tandem.engine.model.states import RequestRows, SamplingTable

_BANNED = float("-inf")


def edit_logits(
    logits: torch.Tensor,  # [S, V] float32, changed in place
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    requests: RequestRows,
    table: SamplingTable,
    eos_token_ids: frozenset[int],
) -> None:
    """Biases, minimum lengths and bad words, for the few rows that have any."""
    vocab = logits.shape[1]
    for index in np.flatnonzero(table.edited[rows]).tolist():
        row, position = int(rows[index]), int(positions[index])
        params = table.params[row]
        if params.logit_bias:
            tokens = [token for token in params.logit_bias if 0 <= token < vocab]
            biases = np.array([params.logit_bias[token] for token in tokens], np.float32)
            device = logits.device
            logits[index].index_add_(
                0, to_device(np.array(tokens, np.int64), device), to_device(biases, device)
            )
        banned: list[int] = []
        if position - int(requests.num_prompt_tokens[row]) < params.min_tokens:
            banned.extend(params.stop_token_ids)
            if not params.ignore_eos:
                banned.extend(eos_token_ids)
        if params.bad_words:
            history = requests.tokens[row]
            for word in params.bad_words:
                start = position - len(word) + 1
                if (
                    word
                    and start >= requests.num_unsaid[row]
                    and history[start:position].tolist() == word[:-1]
                ):
                    banned.append(word[-1])
        banned = [token for token in banned if 0 <= token < vocab]
        if banned:
            logits[index].index_fill_(0, to_device(np.array(banned, np.int64), logits.device), _BANNED)


def penalize(
    logits: torch.Tensor,  # [S, V] float32, changed in place
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    requests: RequestRows,
    table: SamplingTable,
) -> None:
    """Repetition looks at prompt and output; presence and frequency look at the output alone."""
    which = np.flatnonzero(table.penalized[rows])
    rows, positions = rows[which], positions[which]
    vocab = logits.shape[1]
    place = np.arange(int(positions.max()))
    history = requests.tokens[rows, : len(place)].astype(np.int64)
    known = (place < positions[:, None]) & (place >= requests.num_unsaid[rows][:, None])
    output = known & (place >= requests.num_prompt_tokens[rows][:, None])
    # Where each token of the histories stands in the logits, taken as one run of numbers.
    index = which[:, None] * vocab + history
    flat = logits.view(-1)

    def chosen(
        mask: npt.NDArray[np.bool_], strength: npt.NDArray[np.float32], neutral: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For the requests that have such a penalty: their tokens' places, and how strong it is at each."""
        strengths = np.broadcast_to(strength[rows][:, None], mask.shape)
        mask = mask & (strengths != neutral)
        device = logits.device
        return to_device(index[mask], device), to_device(strengths[mask], device)

    # A token that occurs often is written often, each time with the same number.
    if (table.repetition[rows] != 1.0).any():
        places, factor = chosen(known, table.repetition, 1.0)
        before = flat[places]
        flat[places] = torch.where(before > 0, before / factor, before * factor)
    if table.presence[rows].any():
        places, once = chosen(output, table.presence, 0.0)
        flat[places] = flat[places] - once
    if table.frequency[rows].any():
        places, each = chosen(output, table.frequency, 0.0)
        flat.index_add_(0, places, -each)
