"""Attention over the paged KV cache, reached from any transformers model through its attention interface.

interface            how a model's layers come here; attention as the forward pass sees it, whichever of these computes it
layers               what one layer does, and where its KV lies
gathered, kernel     blocks copied together, then torch
latents              the same where a token's keys and values are compressed into one for all heads
own                  a layer's own code, over what was gathered, request by request
cpu                  the CPU kernels
flashinfer, flashinfer_latents, pages
                     kernels that read the cache where it lies
prebuild             those kernels compiled ahead of time, for images
"""
