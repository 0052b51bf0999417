"""Prompts given as tensors of embeddings. README.md lists the files."""
