"""The prefill node (node.py), the producer: computes prompts, samples the first token, sends the KV, and frees the blocks once the
consumer has confirmed the transfer."""
