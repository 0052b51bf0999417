"""What this machine has and allows: floor 1, below everything that computes.

cores, memory     how many cores and how much memory this process may use; which cores a thread runs on
control_groups    where the kernel keeps a container's limits
digests           what identifies a file's content, remembered on this machine
"""
