"""Encoder nodes, from the side of the nodes that compute prompts. README.md lists the files."""
