"""Encoder nodes: encode each image once for all nodes that compute prompts. README.md lists the files."""
