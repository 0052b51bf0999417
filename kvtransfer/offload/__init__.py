"""Tiers of the KV cache outside the device: full blocks are copied there while their requests run, and loaded again.
README.md lists the files."""
