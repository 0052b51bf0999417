"""A configuration that needs new processes, rolled out while the cluster serves. README.md lists the files."""
