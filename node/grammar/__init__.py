"""Answers that follow a grammar, at a node. README.md lists the files."""
