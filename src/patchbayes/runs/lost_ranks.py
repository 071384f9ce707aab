"""How the loss of one process of a training is noticed by the others, and what they do."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import PatchbayesError
from ..ranks import rank_and_number
from .writing import locked

#: What torch and its backends say when a process has gone or does not answer; few of them have a class of their own.
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed? ?out|socket|store", re.IGNORECASE)


class RankLost(PatchbayesError):
    """Another process of the run has ended, or did not answer in time. What this one knows is saved."""


@contextlib.contextmanager
def noticing_lost_ranks(
    timeout: float, folder: Path, save: Callable[[], bool], where: Callable[[], str]
) -> Iterator[None]:
    """In the block, turn the loss of another process into one message, after saving what is known.

    save    writes the state unless a newer one is there, and says whether it did. One process that is left does, under the
            lock of the folder; any others end without a word.
    """
    _, number = rank_and_number()
    try:
        yield
    except RuntimeError as error:
        if number == 1 or isinstance(error, PatchbayesError) or not _LOST.search(f"{type(error).__name__}: {error}"):
            raise
        saved = _saved(folder, save)
        if saved is None:
            raise SystemExit(1) from None
        why = str(error).strip().splitlines()[0]
        raise RankLost(
            f"another of the {number} processes of this run ended, or did not answer for {timeout:g} seconds, {where()}.\n"
            f"  saved    {'the state after the last whole step' if saved else 'the last checkpoint'}, in {folder}; no step is "
            f"lost.\n  do       go on with resume=True (--resume), with as many processes as you like.\n  because  {why}"
        ) from None


def _saved(folder: Path, save: Callable[[], bool]) -> bool | None:
    """Whether a state was written; None where another process takes care of that."""
    with contextlib.ExitStack() as stack:
        if rank_and_number()[0] != 0:  # the first holds the lock already, if it lives
            try:
                stack.enter_context(locked(folder))
            except PatchbayesError:
                return None
        return save()
