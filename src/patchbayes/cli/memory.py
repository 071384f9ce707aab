"""Freed memory stays with the process: what training frees in one step, it needs again in the next."""

import contextlib
import ctypes
import mmap
import os
import platform
from pathlib import Path

#: Names and values of glibc's mallopt: blocks up to 32 MiB come from the heap, whose end is given back beyond 1 GiB.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = (-3, 2**25), (-1, 2**30)
_TOP_PAD, _ROOM, _USUAL_PAD, _LARGE_PAGE = -2, 2**29, 2**17, 2**21
_OWN_WISHES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed instead of giving it back and getting it again page by page; whether it does.
    Where the kernel has large pages on demand, the heap is made of those.

    For glibc alone, and not where the environment says how it should allocate. A command may do this, since the process is
    its own; importing the library never does. A training step of a patched network, which allocates more than a plain one,
    gains most: `docs/costs.md`.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _OWN_WISHES):
        return False
    library = ctypes.CDLL(None)
    kept = all(library.mallopt(name, value) == 1 for name, value in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
    with contextlib.suppress(OSError):
        _ask_for_large_pages(library)
    return kept


def _ask_for_large_pages(library: ctypes.CDLL) -> None:
    """Let the heap grow by half a gibibyte, of which nothing is used yet, and ask the kernel for pages of 2 MiB there.

    A training step goes through hundreds of megabytes: with pages of 4 KiB the processor forgets where they are.
    """
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    library.free.restype, library.free.argtypes = None, (ctypes.c_void_p,)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.mallopt(_TOP_PAD, _ROOM)
    library.free(library.malloc(_MMAP_THRESHOLD[1] - 2**16))
    library.mallopt(_TOP_PAD, _USUAL_PAD)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            first, end = (int(number, 16) for number in line.split()[0].split("-"))
            first = -(-first // _LARGE_PAGE) * _LARGE_PAGE
            if first < end:
                library.madvise(first, (end - first) // _LARGE_PAGE * _LARGE_PAGE, mmap.MADV_HUGEPAGE)
