"""Recurrent layers, which keep a state of all tokens before instead of each token's keys and values. README.md lists
the files."""
