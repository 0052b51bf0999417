"""Fuses a transformers model into fewer, larger operations. Modules are recognized by what they compute, not by their names.

find        finds modules that can be fused by running them, and replaces them
rotary      delays rotary embedding, and norms of queries and keys, until attention
pieces      the fused operations, and their plain formulas
cpu         the pieces by the CPU kernels (`kernels/`), with packed weights
device      the pieces on a GPU
triton_ops  the Triton kernels of `device`, and their plain torch versions
"""
