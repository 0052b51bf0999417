"""Watches the node's GPUs, and names those that must not compute any more. README.md lists the files."""
