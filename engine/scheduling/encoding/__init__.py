"""Which step encodes a part of an image, and how long its rows are kept. README.md lists the files."""
