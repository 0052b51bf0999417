"""What this machine has and allows. Floor 1: everything that computes imports it.

resources   how many cores and how much memory this process may use; binds threads to cores
digests     the SHA-256 of files, remembered on this machine
pci         how near its GPUs and RDMA devices are to each other
"""
