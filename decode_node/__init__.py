"""The decode node (node.py), the consumer: reserves blocks, waits for the KV, decodes and streams tokens. It computes the prompt itself
if a request has no transfer."""
