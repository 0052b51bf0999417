"""Transfers of a node whose ranks keep their KV apart. README.md lists the files."""
