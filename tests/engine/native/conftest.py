"""These tests need the native library, as those of the kernels do."""

from tests.kernels.conftest import _library, pytest_generate_tests

__all__ = ["_library", "pytest_generate_tests"]
