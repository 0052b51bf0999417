"""The prefill node, the producer: computes prompts, samples the first token, sends the KV, and frees the blocks once the consumer has
confirmed the transfer.

node    the node and its rules
actor   the node as a Ray actor
role    what a cluster does for it
"""
