"""Quantized checkpoints: FP8, AWQ, GPTQ and compressed-tensors. README.md lists the files."""
