"""Running thousands of damaged inputs, and counting what must never happen.

A case is accepted, or refused with an error of ours that says something. It is a fault if it raises anything else, takes
longer than a few seconds, starts a program, opens a connection, imports the canary, or changes what it must leave alone.
"""

import contextlib
import faulthandler
import random
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from patchbayes.errors import PatchbayesError

CANARY = "canary_of_the_attack"
_SECONDS = 10.0
_MOST_GROWTH = 1_500_000  # kB of memory that an attack may take
_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.startfile")
_seen: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event in _PROGRAMS and "git" not in str(arguments[0]):  # git tells which commit a record is of
        _seen.append(f"{event} {arguments[:2]}")
    elif event in ("socket.connect", "pickle.find_class", "webbrowser.open"):
        _seen.append(f"{event} {arguments[-1]}")
    elif event == "exec" and CANARY in getattr(arguments[0], "co_filename", ""):  # the code of a module, when imported
        _seen.append(f"{event} {arguments[0]}")


sys.addaudithook(_watch)


class Hang(BaseException):
    """Raised into a case that takes too long; no handler of ours catches it."""


@dataclass
class Tally:
    """What became of the cases of one attack."""

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        total = self.outcomes.total()
        parts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return f"attack on {self.name}: {total:,} cases, {parts}; {len(self.faults)} faults"


Case = Callable[[random.Random], Callable[[], object]]


def attack(
    name: str,
    cases: int,
    prepare: Case,
    *,
    seed: int = 0,
    unchanged: Callable[[], object] | None = None,
    seconds: float = _SECONDS,
) -> Tally:
    """Run `cases` cases: `prepare(rng)` makes one, and what it returns is what is attacked.

    unchanged: gives the state that no refused case may change.
    """
    global _seen
    tally = Tally(name)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(cases):
        rng = random.Random(f"{name} {seed} {number}")
        run = prepare(rng)
        before = unchanged() if unchanged is not None else None
        _seen = []
        try:
            with _limited(seconds):
                run()
            outcome = "accepted"
        except PatchbayesError as error:
            outcome = "refused"
            if len(str(error)) < 10:
                tally.faults.append(f"case {number} of seed {seed}: says only {str(error)!r}")
        except Hang:
            outcome = "hanging"
            tally.faults.append(f"case {number} of seed {seed}: more than {seconds} s")
        except Exception as error:
            outcome = "raw"
            where = traceback.extract_tb(error.__traceback__)[-1]
            tally.faults.append(
                f"case {number} of seed {seed}: {type(error).__name__}: {str(error)[:200]} "
                f"({where.filename.rpartition('/')[2]}:{where.lineno})"
            )
        finally:
            executed, _seen = _seen, None
        tally.outcomes[outcome] += 1
        tally.faults += [f"case {number} of seed {seed}: executed {event}" for event in executed]
        if before is not None and outcome != "accepted" and unchanged is not None and unchanged() != before:
            tally.faults.append(f"case {number} of seed {seed}: refused, and changed something")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    if grown > _MOST_GROWTH:
        tally.faults.append(f"{grown / 1e6:.1f} GB of memory")
    return tally


def survives(tally: Tally, capsys: Any, *, refused: float, accepted: float = 0.0) -> None:
    """Print the counts, and fail on any fault; at least these shares of the cases must have been refused and accepted,
    or the attack attacks nothing."""
    with capsys.disabled():
        print(f"\n{tally}")
    assert tally.faults == [], "\n".join(tally.faults[:20])
    total = tally.outcomes.total()
    assert tally.outcomes["refused"] >= refused * total
    assert tally.outcomes["accepted"] >= accepted * total


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    faulthandler.dump_traceback_later(20 * seconds, exit=True, file=sys.__stderr__)  # where not even a signal is heard
    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        faulthandler.cancel_dump_traceback_later()
