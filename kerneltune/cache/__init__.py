"""Keep the fastest known configs in files (`entries`), and look up the config of a call (`chooser`)."""

from kerneltune.cache.chooser import Choice, Chooser, clear
from kerneltune.cache.entries import (
    CacheEntry,
    case_fields,
    default_root,
    entry_from,
    in_order,
    load,
    load_strict,
    path_of,
    read_roots,
    readable,
    store,
    store_all,
)

__all__ = [
    "CacheEntry", "Choice", "Chooser", "case_fields", "clear", "default_root",
    "entry_from", "in_order", "load", "load_strict", "path_of", "read_roots", "readable", "store",
    "store_all",
]  # fmt: skip
