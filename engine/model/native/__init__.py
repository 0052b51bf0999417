"""The Llama family on CPUs: the whole forward pass in one C++ library, compiled on first use.

`forward.py` is what a runner sees. Everything else serves it: `architecture.py` says which models fit, `weights.py`
gives their matrices to the library, `build.py` compiles it, `library.py` is its C interface (api.h) in ctypes.
"""
