"""These tests need the native library, like those of the kernels."""

from tests.kernels.conftest import _library, pytest_generate_tests

__all__ = ["_library", "pytest_generate_tests"]
