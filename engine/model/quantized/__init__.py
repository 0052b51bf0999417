"""Checkpoints whose matrices have fewer bits: FP8, AWQ, GPTQ and what compressed-tensors writes.

formats  what such a matrix consists of in a checkpoint, and which numbers it stands for
loading  transformers loads it as it is; then it becomes an ordinary matrix, or one for a GPU's kernels
kernels  products with such matrices, by the kernels that torch brings
"""
