"""Watches the node's GPUs, and names those that must not compute any more.

part   begins to watch the cards of the node's ranks on this machine
watch  the thread that reads the cards, and which readings condemn one
nvml   NVML's functions, by ctypes
"""
