"""Packages of the project, and archives that are equal bit for bit; all other settings are in pyproject.toml.

Two builds of the same sources give equal files in any folder, at any time, under any umask: times come from
SOURCE_DATE_EPOCH, and modes from one bit of each file. The compression is that of zlib, whose versions may differ.
"""

from __future__ import annotations

import gzip
import os
import stat
import tarfile
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist

EXAMPLES = {
    "moevement_cli._examples.simulate": "examples/simulate",
    "moevement_cli._examples.pretrain_moe": "examples/pretrain_moe",
    "moevement_cli._examples.pretrain_moe.configs": "examples/pretrain_moe/configs",
}
"""Folders that `moevement plan deepseek_moe` and `moevement bench` read where there is no checkout, by package."""

EPOCH = "315532800"
"""Time of all files in the archives, in seconds since 1970: 1980-01-01, the first that a wheel can have."""


def plain_mode(mode: int) -> int:
    """Return the permissions of a file or folder in an archive, whatever the umask of the person who builds it."""
    return 0o755 if stat.S_ISDIR(mode) or mode & stat.S_IXUSR else 0o644


class PlainWheel(bdist_wheel):
    """Build of a wheel whose files have plain permissions."""

    def write_wheelfile(self, wheelfile_base: str, *args: str) -> None:
        """Write the last file of the wheel, and set the permissions of all files before they are packed."""
        super().write_wheelfile(wheelfile_base, *args)
        for path in Path(self.bdist_dir).rglob("*"):
            path.chmod(plain_mode(path.stat().st_mode))


class PlainSource(sdist):
    """Build of a source archive without the times, owners and permissions of the machine that builds it."""

    def make_archive(self, base_name: str, format: str, *args: object, base_dir: str, **kwargs: object) -> str:
        """Write ``base_dir`` to the archive ``base_name``.tar.gz, and return its name."""
        if format != "gztar":
            raise SystemExit(f"--formats {format}: needs gztar, the format that pip and build use")
        name, time = f"{base_name}.tar.gz", int(os.environ["SOURCE_DATE_EPOCH"])

        def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
            kind = stat.S_IFDIR if member.isdir() else stat.S_IFREG
            member.mode, member.mtime = plain_mode(kind | member.mode), time
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            return member

        with (
            open(name, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=time) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(base_dir, filter=plain)
        return name


os.environ.setdefault("SOURCE_DATE_EPOCH", EPOCH)
setup(
    packages=[
        *find_namespace_packages(include=["megatron.moevement*", "moevement_core*", "moevement_cli*"]),
        *find_namespace_packages("kernels"),
        *EXAMPLES,
    ],
    package_dir={"moevement_kernels": "kernels/moevement_kernels", **EXAMPLES},
    package_data={
        "moevement_kernels.cuda": ["*.cu", "*.cuh"],
        **{name: ["*.yaml", "*.py"] for name in EXAMPLES},
        "": ["py.typed"],
    },
    include_package_data=False,
    cmdclass={"bdist_wheel": PlainWheel, "sdist": PlainSource},
)
