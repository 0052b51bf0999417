"""`tandem doctor`: what this machine offers, what is wrong with it, and what to do about it.

commands        the command as a row
command         all checks at once, and what is shown of them
machine_checks  versions, cores, memory, disk, ports, model: one check for each subject
link_checks     between machines and between GPUs
gpu_checks      how GPUs' memory leaves the machine
numa_check      which memory is near
"""
