"""Multi-head latent attention, on any device. README.md lists the files."""
