"""The same bits, required of a node. README.md says what it is."""
