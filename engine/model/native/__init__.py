"""Our batches through the CPU kernels (`kernels/`).

`forward.py` is what a runner sees: it gives a model's matrices to the library, and batches. `architecture.py` says which models fit.
"""
