"""GGUF files: see README.md.

format    finds out whether a model is a GGUF file, and joins the loader
header    a file's metadata and tensors, read in little time
metadata  what a file says that transformers ignores
plain     the configuration of plain Llamas and Qwens, without transformers
tensors   what the native library computes with: blocks as they are
"""
