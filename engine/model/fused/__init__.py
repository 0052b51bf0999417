"""Fuses a transformers model into fewer, larger operations. Modules are recognized by what they compute, not by their names.

capability      what is fused on a CPU, and how its steps are computed
find            finds modules that can be fused by running them, and replaces them
residual        puts off what a layer adds to its residual until the next norm
rotary          delays rotary embedding, and norms of queries and keys, until attention
cpu             the pieces by the CPU kernels (`kernels/`), with packed weights
cpu_attention   attention by the CPU kernels
recorded_steps  steps recorded once per number of tokens and replayed; tape records and replays one
"""
