"""The processes of a node that is wider than one device. README.md lists the files."""
