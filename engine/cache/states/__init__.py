"""Recurrent states among the blocks: which blocks they fill, and after which tokens they are kept. README.md lists the
files."""
