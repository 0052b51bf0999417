"""Builds the wheel; everything else about the package stands in pyproject.toml.

With TANDEM_KERNELS=1 the wheel holds the compiled CPU kernels and is for one platform. Without, it is for every platform,
and each machine compiles the kernels when it first needs them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

COMPILED = os.environ.get("TANDEM_KERNELS") == "1"


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if COMPILED and not self.editable_mode:
            sys.path.insert(0, str(Path(__file__).parent))
            from tandem.kernels.build import ship

            ship(Path(self.build_lib) / "tandem" / "kernels" / "compiled")


class MadeForOnePlatform(Distribution):
    def has_ext_modules(self) -> bool:
        return COMPILED


class WheelForAnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        # The library is called through ctypes: any Python 3 will do.
        return ("py3", "none", super().get_tag()[2])


setup(distclass=MadeForOnePlatform, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForAnyPython})
