"""Quantized checkpoints: FP8, AWQ, GPTQ and compressed-tensors.

format   finds out whether a checkpoint is quantized, and joins the loader
formats  the tensors of a quantized matrix in a checkpoint, and the numbers that it stands for
tensors  what the native library computes with; blocks makes blocks of matrices of integers
loading  loads quantized matrices with transformers, and turns them into ordinary linear layers or into ones with GPU kernels
parts    which rows and columns of those tensors one of several ranks reads
experts  a mixture's experts, which become ordinary matrices
kernels  linear layers that compute with quantized matrices, by kernels of torch and FlashInfer; round_rows rounds their rows
"""
