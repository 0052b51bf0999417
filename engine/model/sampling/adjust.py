"""Changes logits before sampling: bans, biases and penalties. Penalties count all of the request's tokens so far."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.model.batching import RequestRows, SamplingTable
from tandem.engine.model.staging import to_device

_BANNED = float("-inf")


def edit_logits(
    logits: torch.Tensor,  # [S, V] float32, changed in place
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    requests: RequestRows,
    table: SamplingTable,
    eos_token_ids: frozenset[int],
) -> None:
    """Applies logit biases, minimum lengths and bad words to the rows that have any."""
    vocab = logits.shape[1]
    for index in np.flatnonzero(table.edited[rows]).tolist():
        row, position = int(rows[index]), int(positions[index])
        params = table.params[row]
        if (biased := table.biases.get(row)) is not None:
            tokens, biases = biased
            known = (tokens >= 0) & (tokens < vocab)
            device = logits.device
            logits[index].index_add_(0, to_device(tokens[known], device), to_device(biases[known], device))
        banned: list[int] = []
        if position - int(requests.num_prompt_tokens[row]) < params.min_tokens:
            banned.extend(params.stop_token_ids)
            if not params.ignore_eos:
                banned.extend(eos_token_ids)
        if params.bad_words:
            history = requests.tokens[row]
            last = int(history[position - 1])
            for word in params.bad_words:
                if len(word) > 1 and word[-2] != last:
                    continue  # nearly every word
                start = position - len(word) + 1
                if word and start >= requests.num_unsaid[row] and history[start:position].tolist() == word[:-1]:
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
    """Applies penalties. Repetition counts the prompt and the output; presence and frequency count only the output."""
    which = np.flatnonzero(table.penalized[rows])
    rows, positions = rows[which], positions[which]
    vocab = logits.shape[1]
    place = np.arange(int(positions.max()))
    history = requests.tokens[rows, : len(place)].astype(np.int64)
    known = (place < positions[:, None]) & (place >= requests.num_unsaid[rows][:, None])
    output = known & (place >= requests.num_prompt_tokens[rows][:, None])
    # The index of each history token in the flattened logits.
    index = which[:, None] * vocab + history
    flat = logits.view(-1)

    def chosen(
        mask: npt.NDArray[np.bool_], strength: npt.NDArray[np.float32], neutral: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For the rows with such a penalty: the indices of their tokens, and the penalty at each."""
        strengths = np.broadcast_to(strength[rows][:, None], mask.shape)
        mask = mask & (strengths != neutral)
        device = logits.device
        return to_device(index[mask], device), to_device(strengths[mask], device)

    # A token that occurs several times is written several times with the same value.
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
