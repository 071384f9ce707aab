"""What a run tells while it trains: log.txt, a bar on the terminal, TensorBoard."""

import contextlib
import importlib.util
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from ..errors import PatchbayesError
from .writing import writing


class Journal:
    """Tells how a run goes. `silent` processes (all but the first) tell nothing; `quiet` leaves out the bar."""

    def __init__(self, folder: Path, *, total: int, quiet: bool, tensorboard: bool, silent: bool = False) -> None:
        self.folder, self.total, self.silent = folder, total, silent
        watched = not quiet and not silent and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
        self._bar: Any = _bar() if watched else None
        self._task: Any = None
        self._new_writer = _tensorboard_writer() if tensorboard and not silent else None
        self._writer: Any = None
        self._ending = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._ending.enter_context(self._bar)
            self._task = self._bar.add_task("training", total=self.total)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def begin(self, step: int) -> None:
        """The run begins, or goes on, after so many steps; later ones that TensorBoard has seen are forgotten."""
        if self._new_writer is not None:
            with writing(self.folder / "tensorboard"):
                self._writer = self._new_writer(str(self.folder / "tensorboard"), purge_step=step)
            self._ending.callback(self._writer.close)
        self.advance(step)

    def log(self, text: str) -> None:
        """Add lines to log.txt."""
        if self.silent:
            return
        path = self.folder / "log.txt"
        stamp = datetime.now().astimezone().isoformat(timespec="seconds")
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(f"{stamp}  {text}\n")

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def row(self, row: Mapping[str, Any]) -> None:
        """A row of metrics was written."""
        text = ", ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float))
        self.log(f"epoch {row['epoch']}: {text}{', best so far' if row['best'] else ''}")
        if self._bar is not None:
            score = next((f", {key} {row[key]:.4g}" for key in ("held_out_rmse", "held_out_nll") if key in row), "")
            self._bar.update(self._task, description=f"epoch {row['epoch']}: loss {row['loss']:.4g}{score}")
        if self._writer is not None:
            for key, value in row.items():
                if isinstance(value, float):
                    self._writer.add_scalar(key, value, row["step"])
            self._writer.flush()


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _tensorboard_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise PatchbayesError(
            f"tensorboard=True needs the package tensorboard ({error}).\n  do       pip install 'patchbayes[tensorboard]'"
        ) from None
    return SummaryWriter
