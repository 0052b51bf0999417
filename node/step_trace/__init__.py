"""The scheduler trace: what a node's scheduler saw and decided, step by step, for `tandem replay` and the simulator.
README.md lists the files."""
