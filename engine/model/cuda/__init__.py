"""What a CUDA device adds to the general path.

capability   whether the model is on such a device, and what it gets there
pieces       fused operations; triton_ops has the Triton kernels between products, and their plain versions
flashinfer, flashinfer_latents, pages
             attention by FlashInfer's kernels, which read the cache in place
prebuild     compiles these kernels ahead of time, for container images
decode_graphs, decode_inputs, fixed
             steps recorded once per shape and replayed as CUDA graphs, their inputs and their attention
step_memory  what a step takes of the device's memory besides the KV cache
"""
