"""Several router processes on one port, a wing of the router. README.md lists the files."""
