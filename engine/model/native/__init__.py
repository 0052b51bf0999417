"""The native path: Llama-like models in the C++ library of `kernels/`.

`forward.py` has the forward pass, which gives the library a model's matrices and then each batch. `architecture.py` says which models
of `model_types.py` the library computes. `blocks.py` keeps matrices in a GGUF file's blocks beside a checkpoint. `shared.py` keeps packed weights in a file that all nodes of a
machine map.
"""
