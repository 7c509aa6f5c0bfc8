"""Files of data sets: the cache, the search in it, and checked downloads into it."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

_VARIABLE = "MANIFOLDMUON_DATA"


class DatasetError(RuntimeError):
    """A data set that is missing, damaged or not to be had; one line that says what to do."""


def data_home() -> Path:
    """The folder where data sets are looked for and downloaded to.

    The environment variable `MANIFOLDMUON_DATA` if it is set, else the user's cache folder for
    manifoldmuon.
    """
    if folder := os.environ.get(_VARIABLE):
        return Path(folder).expanduser()
    return Path(_pooch().os_cache("manifoldmuon"))


def find(what: str, directory: Path, names: tuple[str, ...]) -> Path:
    """The first of `names` that is a file in `directory`.

    Raises:
      DatasetError: if none of them is; the message says which names were looked for, and where.
    """
    for name in names:
        if (directory / name).is_file():
            return directory / name
    if not directory.exists():
        raise DatasetError(f"{what}: there is no folder {directory}")
    raise DatasetError(f"{what}: found no {' or '.join(names)} in {directory}")


def fetch(
    what: str,
    path: Path,
    url: str,
    digest: str,
    download: bool,
    read: Callable[[Path], bytes] = Path.read_bytes,
) -> Path:
    """`path`, downloaded from `url` first if it does not exist; checked in either case.

    Args:
      what: the data set's name, for messages.
      path: where the file is or shall be.
      url: where it comes from.
      digest: of the contents, as `algorithm:hex`.
      download: whether it may be downloaded.
      read: how the contents are read from a path.

    Raises:
      DatasetError: if the file is missing and not to be had, or its contents have another
        digest. A download gets its name after the check, so a broken one is not kept.
    """
    if path.is_file():
        _check(str(path), read(path), digest)
    elif download:
        _download(what, path, url, digest, read)
    else:
        raise DatasetError(f"{what}: found no {path.name} in {path.parent}; {_remedy(path)}")
    return path


def _check(name: str, contents: bytes, digest: str) -> None:
    algorithm, expected = digest.split(":")
    arrived = hashlib.new(algorithm, contents, usedforsecurity=False).hexdigest()
    if arrived != expected:
        raise DatasetError(
            f"{name} is damaged or another file: its contents have the {algorithm} {arrived} "
            f"and not {expected}; get it again"
        )


def _download(what: str, path: Path, url: str, digest: str, read: Callable[[Path], bytes]) -> None:
    pooch = _pooch()
    downloader = pooch.HTTPDownloader()

    def checked(source: Any, destination: Any, manager: Any, **options: Any) -> None:
        downloader(source, destination, manager, **options)
        _check(f"what came from {url}", read(Path(destination)), digest)

    # No digest in pooch's registry: it would be that of the file, and ours is of the contents.
    manager = pooch.create(path=path.parent, base_url="", registry={path.name: None})
    manager.urls[path.name] = url
    try:
        manager.fetch(path.name, downloader=cast(Any, checked))
    except OSError as error:  # the errors of `requests` are such, and those of a full disk
        # The cause holds a page of connection pools and retries, and nothing that helps.
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
            "the cache and downloads need pooch: pip install 'manifoldmuon[studies]', or set "
            f"{_VARIABLE} to a folder with the files"
        ) from None
    return pooch
