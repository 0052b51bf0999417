"""Our batches through the CPU kernels (`kernels/`).

`forward.py` is what a runner sees. `architecture.py` says which models fit, `weights.py` gives their matrices to the
library.
"""
