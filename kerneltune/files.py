"""Files that are replaced as a whole or not at all, or added to, and where those of this package are.

Knows nothing of what is in them. Imports the standard library.
"""

import os
from pathlib import Path

RESULTS = "KERNELTUNE_RESULTS"
"""Environment variable: the folder of the records."""


def data_root(folder: str) -> Path:
    """`folder` of the checkout that holds this package, or its packaged copy where there is no checkout."""
    package = Path(__file__).resolve().parent
    in_checkout = (package.parent / "pyproject.toml").is_file()
    return (package.parent if in_checkout else package) / folder


def replace_text(path: Path, text: str) -> None:
    """`replace_bytes` of the text in UTF-8."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` by way of a file beside it, flushed to disk; creates the folders. Pipes are written directly.

    Raises:
        ValueError: `cannot write file: …`; the file is as before.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            _replace(path, content)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error


def append_text(path: Path, text: str) -> None:
    """Add `text` to the end of a file as one write; creates the folders.

    Raises:
        ValueError: `cannot write file: …`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:  # an interrupt as well
        part.unlink(missing_ok=True)
        raise
