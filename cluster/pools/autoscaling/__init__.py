"""Pools that grow and shrink by their load. README.md lists the files."""
