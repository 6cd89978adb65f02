"""Read, validate, lock, replace and append to files of data; no other module does.

A reader gets bytes of a regular file of limited size, and values of a msgspec schema; an error is a line with the file, the line
or entry, the field and the value. A writer replaces a file as a whole or not at all, under a lock that names its holder.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

RESULTS = "KERNELTUNE_RESULTS"
"""Environment variable: the folder of the records."""
MAX_BYTES = 1 << 30
"""Bytes of the largest file that is read."""
WAIT_S = 2.0
"""Seconds after which a waiting process says who holds a lock."""
_POLL_S = 0.02
_SHOWN = 120
"""Characters of a wrong value that a message shows."""
_AT = re.compile(r"^(?P<message>.*?)(?: - at `(?:key in )?(?P<path>\$.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+|\.\.\.)\]")
_FIELD = re.compile(r"^Object (?:missing required|contains unknown) field `(?P<name>.*)`$", re.DOTALL)

_NEW = re.compile(r"\.[0-9a-f]{16}\.tmp")
"""Name of a file that will replace another file."""
_BYTE = re.compile(r"\(byte (\d+)\)$")

T = TypeVar("T")


class UnwritableError(ValueError):
    """Report that a file cannot be written, in a line with the file."""


def data_root(folder: str) -> Path:
    """Return `folder` of the checkout that holds this package; without a checkout its packaged copy."""
    package = Path(__file__).resolve().parent
    return (package.parent if (package.parent / "pyproject.toml").is_file() else package) / folder


def in_checkout() -> bool:
    """Return whether the current folder is in the checkout that holds this package: only from there its data is written to."""
    root = data_root("kerneltune").parent
    try:
        return (root / "pyproject.toml").is_file() and Path.cwd().is_relative_to(root)
    except OSError:  # the current folder was removed
        return False


def written_root(folder: str) -> Path:
    """Return `folder` of the checkout that holds this package, elsewhere of the current folder."""
    return data_root(folder) if in_checkout() else Path(folder)


def is_missing(path: Path) -> bool:
    """Return whether the file is surely missing; a file in a folder that this user may not read may be there."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file; never waits for a pipe."""
    with opened(path, max_bytes) as file:
        return file.read(max_bytes + 1)


@contextlib.contextmanager
def opened(path: Path, max_bytes: int = MAX_BYTES) -> Iterator[BinaryIO]:
    """Open a regular file for reading, line by line or whole; never waits for a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"cannot read {path}: not a regular file")
            if status.st_size > max_bytes:
                raise ValueError(f"cannot read {path}: {status.st_size} bytes: expected at most {max_bytes}")
            yield file
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the content of a regular file as UTF-8."""
    try:
        return read_bytes(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {path}: not UTF-8") from error


def decode(data: bytes | str, schema: type[T]) -> T:
    """Return the value of a JSON text that fits a msgspec schema."""
    try:
        return msgspec.json.decode(data, type=schema)
    except msgspec.ValidationError as error:
        raise ValueError(_explained(error, data)) from error
    except msgspec.DecodeError as error:
        raise ValueError(f"JSON: {_placed(_lower(str(error).removeprefix('JSON is malformed: ')), data)}") from error
    except UnicodeDecodeError as error:
        raise ValueError("JSON: not readable as UTF-8 JSON") from error
    except RecursionError as error:
        raise ValueError("JSON: nested too deeply") from error


class Versioned(msgspec.Struct):
    """Hold the field that files of every schema have: its version."""

    schema: int


def decode_versioned(data: bytes | str, kind: type[T], version: int, **expected: str) -> T:
    """Return the content of a file that has this version and these values of some fields."""
    schema = decode(data, Versioned).schema
    if schema != version:
        raise bad("schema", schema, repr(version))
    content = decode(data, kind)
    for name, value in expected.items():
        if getattr(content, name) != value:
            raise bad(name, getattr(content, name), repr(value))
    return content


def checked(values: object, schema: type[T], field: str = "") -> T:
    """Return plain values converted to a msgspec schema."""
    try:
        return msgspec.convert(values, schema)
    except msgspec.ValidationError as error:
        raise ValueError(f"{field}{'.' if field else ''}{_explained(error, values)}") from error


def bad(field: str, value: object, expected: str) -> ValueError:
    """Return the error of a wrong value: `field: value: expected …`, long values cut."""
    return ValueError(f"{field}: {_short(value)}: expected {expected}")


def replace_text(path: Path, text: str) -> None:
    """Replace a file by a text in UTF-8, see `replace_bytes`."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` by way of a new file beside it, flushed to disk; creates the folders.

    A symbolic link stays: the file that it names is replaced. Devices and pipes are written directly.
    """
    with writing(path):
        if path.exists() and not path.is_file():
            path.write_bytes(content)
        else:
            _replace(path.resolve() if path.is_symlink() else path, content)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Create the folders of a file that is written within; raise an error of the system as an UnwritableError of this file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, RuntimeError) as error:
        raise UnwritableError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error


def append_lines(path: Path, data: bytes, keep_partial: bool = False) -> None:
    """Make the folders, append all lines or none under the lock of the file, and flush them to disk.

    keep_partial: whether text behind the last newline, such as a killed process leaves, gets a newline. Else it is cut off.
    """
    with writing(path), path.open("a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            if keep_partial:
                data = b"\n" + data
            else:
                size = os.pread(file.fileno(), size, 0).rfind(b"\n") + 1
                file.truncate(size)
        try:
            if os.write(file.fileno(), data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file that is about to be read and replaced; creates the folders.

    The lock is `.NAME.lock` beside the file. It ends with the process that holds it. After 2 s of waiting a warning names this
    process.
    """
    lock = path.with_name(f".{path.name}.lock")
    with writing(path):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with writing(path):  # a file system without locks
            _wait(descriptor, path)
        with contextlib.suppress(OSError):  # a full disk: the holder's name is a courtesy
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} ({' '.join(map(os.path.basename, sys.argv[:2]))})".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _wait(descriptor: int, path: Path) -> None:
    """Take the lock of an open file; warn once after `WAIT_S`."""
    warn_at = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= warn_at:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                warnings.warn(f"{path}: locked by {holder}: waiting", stacklevel=2)
                warn_at = float("inf")
            time.sleep(_POLL_S)


def _replace(path: Path, content: bytes) -> None:
    def touch() -> Path:
        new = path.parent / f".{secrets.token_hex(8)}.tmp"
        new.touch(exist_ok=False)
        return new

    remove_abandoned(other for other in path.parent.glob(".*.tmp") if _NEW.fullmatch(other.name))
    part, descriptor = new_locked(touch)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if path.exists():
                os.fchmod(descriptor, stat.S_IMODE(path.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
    except BaseException:  # an interrupt as well
        part.unlink(missing_ok=True)
        raise


def new_locked(make: Callable[[], Path]) -> tuple[Path, int]:
    """Return a new file or folder, and the descriptor that keeps it locked until it is closed or its process ends."""
    while True:
        path = make()
        with contextlib.suppress(FileNotFoundError):
            descriptor = _opened_itself(path)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():  # else another process saw it before it was locked, and removed it
                return path, descriptor
            os.close(descriptor)


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Remove the files and folders that killed processes left: nobody holds their locks."""
    for path in paths:
        with contextlib.suppress(OSError):  # locked, gone, a link, or of another user
            descriptor = _opened_itself(path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
            finally:
                os.close(descriptor)


def _opened_itself(path: Path) -> int:
    """Return the descriptor of a file or folder; a link is an error."""
    kind = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_WRONLY
    return os.open(path, kind | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _explained(error: msgspec.ValidationError, data: object) -> str:
    """Return the error of msgspec as `field: value: expected …`."""
    parts = _AT.match(str(error))
    assert parts is not None
    message, path = parts["message"], parts["path"] or "$"
    steps = [step["name"] or int(step["index"]) for step in _STEP.finditer(path) if step["index"] != "..."]
    if isinstance(error.__cause__, ValueError):  # of the class itself, which names the field
        return f"{_joined(steps)}{': ' if steps else ''}{error.__cause__}"
    named = _FIELD.match(message)
    if named is not None and "missing" in message:
        return f"{_joined([*steps, named['name']])}: missing"
    try:
        value: Any = msgspec.json.decode(data) if isinstance(data, bytes | str) else data
        for step in [*steps, *([named["name"]] if named is not None else [])]:
            value = value[step]
    except (msgspec.DecodeError, LookupError, TypeError, RecursionError, UnicodeDecodeError):  # broken behind the wrong value
        return f"{_joined(steps) or 'JSON'}: {_lower(message)}"
    if named is not None:
        return f"{_joined([*steps, named['name']])}: {_short(value)}: expected no field of this name"
    expected = message.partition(", got ")[0].replace("`", "")
    return f"{_joined(steps) or 'JSON'}: {_short(value)}: {_lower(expected)}"


def _placed(message: str, data: bytes | str) -> str:
    """Return msgspec's message with a line in place of the byte, where the text has several."""
    byte = _BYTE.search(message)
    raw = data.encode(errors="replace") if isinstance(data, str) else data
    if byte is None or b"\n" not in raw:
        return message
    line = raw.count(b"\n", 0, int(byte[1])) + 1
    return f"{message[: byte.start()]}at line {line}"


def _joined(steps: list[Any]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
