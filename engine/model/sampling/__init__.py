"""Samples tokens from logits.

sampler    min_p, top_k, top_p and one token per row, for all rows at once; the noise is a function of seed and position
selection  bounds for top_k and top_p on a device whose results the host must not wait for
adjust     bans, biases and penalties
logprobs   log-probabilities for clients; prompt_logprobs collects those of prompts
row_sums   sums that have the same bits in any batch
"""
