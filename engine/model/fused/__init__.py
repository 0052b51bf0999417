"""A transformers model with fewer, larger operations: found by what its modules compute, not by their names.

find        what a module is, by trying it out; the model's modules give way to ours
rotary      what waits until attention
pieces      what can be had in one operation, and its plain formula
cpu         the same by the CPU kernels (`kernels/`), with packed weights
device      the same on a GPU
triton_ops  its kernels, and what they compute in torch
"""
