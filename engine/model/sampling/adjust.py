"""What changes logits before a token is chosen: bans, biases, penalties. Penalties see all history so far."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.model.sampling.table import SamplingTable
from engine.model.states import RequestRows

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
            biases = torch.tensor([params.logit_bias[token] for token in tokens], device=logits.device)
            logits[index, tokens] += biases
        banned: list[int] = []
        if position - int(requests.num_prompt_tokens[row]) < params.min_tokens:
            banned.extend(params.stop_token_ids)
            if not params.ignore_eos:
                banned.extend(eos_token_ids)
        if params.bad_words:
            history = requests.tokens[row]
            for word in params.bad_words:
                start = position - len(word) + 1
                if word and start >= 0 and history[start:position].tolist() == word[:-1]:
                    banned.append(word[-1])
        banned = [token for token in banned if 0 <= token < vocab]
        if banned:
            logits[index, banned] = _BANNED


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
    device, vocab = logits.device, logits.shape[1]

    def column(values: npt.NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(values[rows]).to(device)[:, None]

    longest = int(positions.max())
    place = np.arange(longest)
    history = requests.tokens[rows, :longest].astype(np.int64)
    history[place >= positions[:, None]] = vocab  # a column of its own for what is no token
    chosen = torch.from_numpy(which).to(device)
    penalized = logits[chosen]

    if (table.repetition[rows] != 1.0).any():
        seen = torch.zeros(len(rows), vocab + 1, dtype=torch.bool, device=device)
        seen.scatter_(1, torch.from_numpy(history).to(device), True)
        factor = column(table.repetition)
        repeated = torch.where(penalized > 0, penalized / factor, penalized * factor)
        penalized = torch.where(seen[:, :vocab], repeated, penalized)
    if table.presence[rows].any() or table.frequency[rows].any():
        output = np.where(place >= requests.num_prompt_tokens[rows][:, None], history, vocab)
        counts = torch.zeros(len(rows), vocab + 1, device=device)
        tokens = torch.from_numpy(output).to(device)
        counts.scatter_add_(1, tokens, torch.ones((), device=device).expand(tokens.shape))
        counts = counts[:, :vocab]
        penalized = penalized - column(table.frequency) * counts - column(table.presence) * (counts > 0)
    logits[chosen] = penalized
