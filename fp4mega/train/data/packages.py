"""Text of installable packages: which ones, fetched with pip and apt, read out of their archives, with their licence.

Nothing of a package is installed or run: wheels and .deb files are opened as archives. PyPI packages come as wheels for any
platform, Debian packages as the .deb of the release that runs here.
"""

import bz2
import gzip
import io
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath
from typing import IO

REGISTRIES = ("pypi", "debian")
DEFAULT_MAX_BYTES = 40_000_000
LARGEST_FILE = 256 * 1024
"""A larger file is rarely written by hand."""
_LARGEST_INNER_ARCHIVE = 2 << 30
COPYRIGHT = re.compile(r"usr/share/doc/[^/]+/copyright")
"""Where a Debian package says its licence; `read_files` gives it when asked for the suffix `/copyright`."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]*")
_LONGEST_LICENCE_NAME = 5
_INNER_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".zip")
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    RuntimeError,
)
_DECOMPRESS = {".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress}


@dataclass(frozen=True, slots=True)
class Package:
    """One line of the list.

    max_bytes bounds the text taken, one_in takes one file in that many (by the hash of its path), licence replaces what the
    package says.
    """

    registry: str
    name: str
    version: str | None = None
    max_bytes: int = DEFAULT_MAX_BYTES
    licence: str | None = None
    one_in: int = 1

    def takes(self, path: str) -> bool:
        """Whether the file at this path of the archive is among those taken."""
        return self.one_in == 1 or zlib.crc32(path.encode()) % self.one_in == 0


def read_list(path: Path) -> list[Package]:
    """Packages of a list file. Raises ValueError naming file, line and what is allowed."""
    packages: list[Package] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            try:
                packages.append(_parse(words))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    names = [(p.registry, p.name) for p in packages]
    if twice := sorted({" ".join(name) for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: listed twice: {', '.join(twice)}")
    if not packages:
        raise ValueError(f"{path}: lists no package")
    return packages


def _parse(words: list[str]) -> Package:
    if len(words) < 2 or words[0] not in REGISTRIES:
        raise ValueError(
            f"{' '.join(words)!r}: expected REGISTRY NAME[==VERSION] [max_mb=N] [one_in=N] [licence=NAME], "
            f"REGISTRY one of {', '.join(REGISTRIES)}"
        )
    registry, (name, _, version) = words[0], words[1].partition("==")
    if not _NAME.fullmatch(name):
        raise ValueError(f"name={name!r}: expected letters, digits and . + _ -")
    max_bytes, licence, one_in = DEFAULT_MAX_BYTES, None, 1
    for option in words[2:]:
        key, _, value = option.partition("=")
        if key == "max_mb" and value.isdigit() and int(value) > 0:
            max_bytes = int(value) * 1_000_000
        elif key == "one_in" and value.isdigit() and int(value) > 0:
            one_in = int(value)
        elif key == "licence" and value:
            licence = value
        else:
            raise ValueError(
                f"{option!r}: allowed: max_mb=N and one_in=N with N of 1 or more, licence=NAME"
            )
    return Package(registry, name, version or None, max_bytes, licence, one_in)


def fetch(package: Package, folder: Path) -> Path:
    """The package's archive in `folder`, downloaded unless it is there. Raises ValueError with the client's last words."""
    place = folder / f"{package.registry}_{package.name}"
    place.mkdir(parents=True, exist_ok=True)
    pattern = "*.whl" if package.registry == "pypi" else "*.deb"
    found = sorted(place.glob(pattern))
    wanted = [path for path in found if version_of(path) == (package.version or version_of(path))]
    if not wanted:
        partial = place / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _run_client(package, partial)
        made = sorted(partial.glob(pattern))
        if len(made) != 1:
            raise ValueError(
                f"{package.registry} {package.name}: the client left {len(made)} archives, expected 1"
            )
        made[0].replace(place / made[0].name)
        shutil.rmtree(partial)
        wanted = [place / made[0].name]
    return wanted[-1]


def _run_client(package: Package, folder: Path) -> None:
    if package.registry == "pypi":
        pinned = f"{package.name}=={package.version}" if package.version else package.name
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--platform=any", "--implementation=py", "--abi=none"]
        command += ["--python-version=3.13", "--dest", ".", pinned]
    else:
        pinned = f"{package.name}={package.version}" if package.version else package.name
        command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", pinned]
    if shutil.which(command[0]) is None:
        raise ValueError(
            f"{package.registry} {package.name}: {command[0]} is not installed on this machine"
        )
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise ValueError(
            f"{package.registry} {pinned}: {command[0]} ended with {done.returncode}: {said[-1] if said else 'no message'}"
        )


def version_of(archive: Path) -> str:
    """The version in the archive's file name."""
    separator = "-" if archive.suffix == ".whl" else "_"
    return archive.name.split(separator)[1].replace("%3a", ":")


def read_files(archive: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Path and content of each file that ends in one of the suffixes, once, at most `LARGEST_FILE` bytes long.

    A compressed file counts under its name without `.gz`, `.xz` or `.bz2`; archives inside are gone through too. Links
    are passed over. Raises ValueError when the archive is damaged.
    """
    try:
        if archive.suffix == ".whl":
            yield from _from_zip(zipfile.ZipFile(archive), "", suffixes)
        else:
            yield from _from_deb(archive, suffixes)
    except _DAMAGED as error:
        raise ValueError(
            f"{archive}: damaged archive ({error}); delete it to fetch it again"
        ) from error


def _from_deb(archive: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(archive)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
            yield from _from_tar(tar, "", suffixes)
        process.stdout.read()  # to the end: dpkg-deb reports a damaged archive only there
    if process.returncode:
        raise ValueError(
            f"{archive}: dpkg-deb ended with {process.returncode}; delete it to fetch it again"
        )


def _from_tar(
    tar: tarfile.TarFile, prefix: str, suffixes: tuple[str, ...]
) -> Iterator[tuple[str, bytes]]:
    for member in tar:
        stream = tar.extractfile(member) if member.isfile() else None
        if stream is not None:
            yield from _from_file(prefix + member.name, member.size, stream, suffixes)


def _from_zip(
    archive: zipfile.ZipFile, prefix: str, suffixes: tuple[str, ...]
) -> Iterator[tuple[str, bytes]]:
    with archive:
        for info in sorted(archive.infolist(), key=lambda i: i.filename):
            if not info.is_dir() and info.filename.endswith((*suffixes, *_INNER_ARCHIVES)):
                with archive.open(info) as stream:
                    yield from _from_file(prefix + info.filename, info.file_size, stream, suffixes)


def _from_file(
    name: str, size: int, stream: IO[bytes], suffixes: tuple[str, ...]
) -> Iterator[tuple[str, bytes]]:
    if name.endswith(_INNER_ARCHIVES):
        if size < _LARGEST_INNER_ARCHIVE:
            with suppress(*_DAMAGED):  # packages ship damaged archives too, to test with
                yield from _from_inner_archive(name, stream, suffixes)
        return
    ending = PurePosixPath(name).suffix
    plain = name.removesuffix(ending) if ending in _DECOMPRESS else name
    if plain.endswith(suffixes) and size <= LARGEST_FILE:
        content = stream.read()
        if plain != name:
            try:
                content = _DECOMPRESS[ending](content)
            except _DAMAGED:
                return
        if len(content) <= LARGEST_FILE:
            yield plain, content


def _from_inner_archive(
    name: str, stream: IO[bytes], suffixes: tuple[str, ...]
) -> Iterator[tuple[str, bytes]]:
    if name.endswith(".zip"):
        yield from _from_zip(zipfile.ZipFile(io.BytesIO(stream.read())), f"{name}/", suffixes)
    else:
        with tarfile.open(fileobj=stream, mode="r|*") as tar:
            yield from _from_tar(tar, f"{name}/", suffixes)


def licence_of(package: Package, archive: Path, copyright_file: bytes | None) -> str | None:
    """The licence as the package states it: wheel metadata, or the short names in Debian's copyright file; None for neither."""
    if package.licence is not None:
        return package.licence
    wheel = archive.suffix == ".whl"
    return (_wheel_licence(archive) if wheel else _debian_licence(copyright_file)) or None


def _wheel_licence(archive: Path) -> str:
    with zipfile.ZipFile(archive) as wheel:
        name = next(
            (n for n in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)), None
        )
        if name is None:
            return ""
        headers = HeaderParser().parsestr(wheel.read(name).decode("utf-8", errors="replace"))
    stated = headers.get("License-Expression") or ""
    if not stated:
        classified = [
            c.rpartition(" :: ")[2]
            for c in headers.get_all("Classifier", [])
            if c.startswith("License ::")
        ]
        written = (headers.get("License") or "").strip().splitlines()
        stated = ", ".join(classified) or (written[0] if written else "")
    return stated.strip()


def _debian_licence(content: bytes | None) -> str:
    """Short names of a machine-readable copyright file; for others the common licences that the text points to."""
    text = (content or b"").decode("utf-8", errors="replace")
    names = re.findall(r"^License:[ \t]*(\S.*)$", text, flags=re.MULTILINE)
    # A line of many words is the beginning of the licence's text.
    names = [name for name in names if len(name.split()) <= _LONGEST_LICENCE_NAME]
    names = names or re.findall(r"/usr/share/common-licenses/([A-Za-z0-9.-]*[A-Za-z0-9])", text)
    return ", ".join(sorted(dict.fromkeys(n.strip() for n in names)))
