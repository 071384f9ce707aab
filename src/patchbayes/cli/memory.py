"""Freed memory stays with the process: what training frees in one step, it needs again in the next."""

import ctypes
import os
import platform

#: Names and values of glibc's mallopt: blocks up to 32 MiB come from the heap, whose end is given back beyond 1 GiB.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = (-3, 2**25), (-1, 2**30)
_OWN_WISHES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed instead of giving it back and getting it again page by page; whether it does.

    For glibc alone, and not where the environment says how it should allocate. A command may do this, since the process is
    its own; importing the library never does. A training step of a patched network, which allocates more than a plain one,
    gains most: `docs/costs.md`.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _OWN_WISHES):
        return False
    library = ctypes.CDLL(None)
    return all(library.mallopt(name, value) == 1 for name, value in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
