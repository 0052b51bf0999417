"""Fuses a transformers model into fewer, larger operations. Modules are recognized by what they compute, not by their
names. README.md lists the files."""
