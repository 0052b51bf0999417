"""A configuration that needs new processes, rolled out while the cluster serves.

steps    which router or node is replaced next, or that all is taken back; pure
watch    what nodes and routers are observed to do meanwhile
wing     carries out the steps, beside a controller
"""
