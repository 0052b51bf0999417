"""What a CUDA device adds to the general path. README.md lists the files."""
