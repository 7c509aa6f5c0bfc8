"""Data files: a cache folder, search, and verified downloads."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

_VARIABLE = "MANIFOLDMUON_DATA"


class DatasetError(RuntimeError):
    """Data set that is missing, damaged or unavailable; the message is one line with a remedy."""


def data_home() -> Path:
    """Return the folder where data sets are searched and downloaded to.

    This is the environment variable `MANIFOLDMUON_DATA` if set, otherwise manifoldmuon's folder in
    the user's cache.
    """
    if folder := os.environ.get(_VARIABLE):
        return Path(folder).expanduser()
    return Path(_pooch().os_cache("manifoldmuon"))


def find(what: str, directory: Path, names: tuple[str, ...]) -> Path:
    """Return the path of the first of `names` that is a file in `directory`.

    Raises:
      DatasetError: none of them exists; the message lists the names and the folder.
    """
    for name in names:
        if (directory / name).is_file():
            return directory / name
    if not directory.exists():
        raise DatasetError(f"{what}: the folder {directory} does not exist")
    raise DatasetError(f"{what}: {directory} has no {' or '.join(names)}")


def fetch(
    what: str,
    path: Path,
    url: str,
    digest: str,
    download: bool,
    read: Callable[[Path], bytes] = Path.read_bytes,
) -> Path:
    """Return `path`; download it from `url` if it does not exist, and verify it in either case.

    Args:
      what: name of the data set, for messages.
      path: local path of the file.
      url: source of the file.
      digest: digest of the contents, as `algorithm:hex`.
      download: whether the file may be downloaded.
      read: function that reads the contents from a path.

    Raises:
      DatasetError: the file is missing and unavailable, or its digest differs. Downloads are
        renamed to `path` only after the check, so a damaged file is not kept.
    """
    if path.is_file():
        _check(str(path), read(path), digest)
    elif download:
        _download(what, path, url, digest, read)
    else:
        raise DatasetError(f"{what}: {path.parent} has no {path.name}; {_remedy(path)}")
    return path


def _check(name: str, contents: bytes, digest: str) -> None:
    algorithm, expected = digest.split(":")
    arrived = hashlib.new(algorithm, contents, usedforsecurity=False).hexdigest()
    if arrived != expected:
        raise DatasetError(
            f"{name} is damaged or another file: the {algorithm} of its contents is {arrived}, not "
            f"{expected}; get it again"
        )


def _download(what: str, path: Path, url: str, digest: str, read: Callable[[Path], bytes]) -> None:
    pooch = _pooch()
    downloader = pooch.HTTPDownloader()

    def checked(source: Any, destination: Any, manager: Any, **options: Any) -> None:
        downloader(source, destination, manager, **options)
        _check(f"the download of {url}", read(Path(destination)), digest)

    # No digest in pooch's registry: pooch would hash the file, our digest is for the contents.
    manager = pooch.create(path=path.parent, base_url="", registry={path.name: None})
    manager.urls[path.name] = url
    try:
        manager.fetch(path.name, downloader=cast(Any, checked))
    except OSError as error:  # includes the errors of `requests` and of a full disk
        # Drop the cause: pages about connection pools and retries, without useful information.
        raise DatasetError(
            f"{what}: could not download {url} ({type(error).__name__}); {_remedy(path)}"
        ) from None


def _remedy(path: Path) -> str:
    return f"put the file at {path} by hand, or pass directory="


def _pooch():
    try:
        import pooch
    except ImportError:
        raise DatasetError(
            "the cache and downloads need pooch: pip install '.[studies]' from the root of the "
            f"source, or set {_VARIABLE} to a folder with the files"
        ) from None
    return pooch
