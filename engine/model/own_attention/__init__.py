"""Layers whose attention is something else than ours: they attend by their own code. README.md lists the files."""
