"""Vectors of prompts: see README.md. README.md lists the files."""
