"""How a token is chosen from logits.

sampler    all of it, for all rows at once
table      the parameters of all requests, as arrays
adjust     bans, biases, penalties
restrict   min_p, top_k, top_p
draw       one token per row, with noise that is a function of seed and position
logprobs   log-probabilities as clients see them
"""
