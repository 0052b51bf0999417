"""The scheduler trace: what a node's scheduler saw and decided, step by step, for `tandem replay` and the simulator.

part      writes the trace that `scheduler.trace_folder` asks for
records   the records of a step, as lines of JSON
file      writes lines to files of bounded size, in a thread of its own
"""
