"""Attention over the paged KV cache, reached from any transformers model through its attention interface."""
