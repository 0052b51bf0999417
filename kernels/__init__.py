"""The Llama family on CPUs in one C++ library, compiled on first use. README.md beside this file explains it.

build      finds a compiler and makes the library, once for a machine
library    the library's C interface (api.h), as ctypes sees it
"""
