"""The C++ libraries of the wheel; all else is in pyproject.toml.

They are plain shared libraries that ctypes loads, for several levels of instructions each, so one
wheel serves every Python and every CPU of a kind. Without a compiler they are left out.
"""

import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "libs")]

from kvmesh.core.native_libraries import LIBRARIES, machine_levels, usable_levels  # noqa: E402
from scripts import build_native  # noqa: E402

_PACKAGE = ROOT / "libs" / "kvmesh"


class BuildNative(build_ext):
    """Builds by scripts/build_native.py, beside the sources where they stay."""

    def run(self) -> None:
        """Builds what this machine uses, or for a wheel what any of its kind can use."""
        if self.inplace or self.editable_mode:
            wanted = build_native.targets(_PACKAGE, usable_levels()[:1])
        else:
            wanted = self._targets()
        build_native.build(wanted, self.announce_line)

    def announce_line(self, text: str) -> None:
        """Says where it is."""
        self.announce(text, level=3)

    def get_outputs(self) -> list[str]:
        """Files of the wheel."""
        return [str(target.path) for target in self._targets() if target.path.is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing is copied: an editable installation finds it where it was built."""
        return {}

    def _targets(self) -> list[build_native.Target]:
        package = Path(self.build_lib) / "kvmesh"
        return build_native.targets(package, machine_levels())


class PlatformWheel(bdist_wheel):
    """A wheel for one kind of machine and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """No part of the libraries knows Python."""
        return ("py3", "none", "any" if self.root_is_pure else super().get_tag()[2])


class MaybeNative(Distribution):
    """Without a compiler the wheel holds Python alone."""

    def has_ext_modules(self) -> bool:
        """Whether something will be compiled."""
        return build_native.find_compiler() is not None and bool(machine_levels())


setup(
    distclass=MaybeNative,
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
    ext_modules=[
        Extension(
            f"kvmesh.{library.folder}._{library.name}",
            [str(path.relative_to(ROOT)) for path in library.sources(_PACKAGE)],
        )
        for library in LIBRARIES
    ],
)
