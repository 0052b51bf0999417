"""The consumer, in node.py: reserves blocks, waits for KV, decodes, streams tokens. Without a transfer it does both halves."""
