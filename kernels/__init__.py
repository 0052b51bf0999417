"""The Llama family on CPUs as one C++ library, compiled on first use. README.md lists the files."""
