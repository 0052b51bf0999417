"""The Llama family on CPUs as one C++ library, compiled on first use. README.md beside this file explains it.

build      finds a compiler and compiles the library, once per machine; compiler: one run of it
library    the library's C interface (api.h) in ctypes
"""
