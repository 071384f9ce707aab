"""SIGTERM and Ctrl-C during training: the step is finished, the state saved, the run ends with a word on how to go on."""

import signal
import threading
from types import FrameType
from typing import Self

from ..errors import PatchbayesError


class TrainingInterrupted(PatchbayesError):
    """Training was asked to stop; its state is saved. `signal_number` is the signal, None on a process that got none."""

    def __init__(self, message: str, signal_number: int | None) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class Interruption:
    """Within the block, a first SIGTERM or SIGINT is only noted; a second one acts as usual."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._before: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal_number = number
        self.__exit__()
