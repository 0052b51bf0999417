"""What this machine has and allows: floor 1, below everything that computes.

resources   how many cores and how much memory this process may use; which cores a thread runs on
digests     what identifies a file's content, remembered on this machine
"""
