"""How a token is chosen from logits.

sampler    all of it, for all rows at once: min_p, top_k, top_p, and one token per row, with noise that is a function of seed and position
adjust     bans, biases, penalties
logprobs   log-probabilities as clients see them
"""
