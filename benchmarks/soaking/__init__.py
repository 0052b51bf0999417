"""The parts of `benchmarks.soak`.

requests   what is asked, how answers are read and compared, and many clients at once
cluster    the cluster as its router reports it, what its processes use over time, and nodes that are killed
"""
