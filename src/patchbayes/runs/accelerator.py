"""What runs the training loop on its devices: Hugging Face Accelerate.

It places network and batches on the device, wraps the network for several processes (started with `accelerate launch` or
`torchrun`) and for mixed precision, and leaves the loop to us. Chosen over Lightning Fabric, which does the same, for its
lighter import (1.05 s against 1.96 s, torch included). It is imported only when training begins.
"""

import contextlib
import gc
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ..errors import PatchbayesError
from .config import TrainingConfig
from .interruption import TrainingInterrupted

if TYPE_CHECKING:
    from accelerate import Accelerator


@contextlib.contextmanager
def accelerated(config: TrainingConfig) -> Iterator["Accelerator"]:
    """An Accelerator for the run; afterwards the process is as it was, and may train again otherwise."""
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
        from accelerate.state import AcceleratorState, is_initialized
    except ImportError as error:
        raise PatchbayesError(
            f"training needs the package accelerate ({error}).\n  do       pip install 'patchbayes[cli]'"
        ) from None
    ours = not is_initialized()
    settings: list[Any] = [InitProcessGroupKwargs(timeout=timedelta(seconds=config.timeout))]
    if config.alternate:  # what rests in a turn has no gradient to wait for
        settings.append(DistributedDataParallelKwargs(find_unused_parameters=True))
    with processor_settings(config.threads):
        try:
            accelerator = Accelerator(
                # Where there is nothing else, it must be told so: several processes would not find each other.
                cpu=config.device == "cpu" or not torch.accelerator.is_available(),
                mixed_precision="bf16" if config.precision == "bfloat16" else "no",
                kwargs_handlers=settings,
            )
        except ValueError as error:
            raise PatchbayesError(
                f"TrainingConfig(precision={config.precision!r}, device={config.device!r}) is not available here: {error}"
            ) from None
        try:
            yield accelerator
            _leave_together(accelerator)
        except TrainingInterrupted:  # all processes come here
            _leave_together(accelerator)
            raise
        finally:
            if ours:
                AcceleratorState._reset_state(reset_partial_state=True)


def _leave_together(accelerator: "Accelerator") -> None:
    """With gloo, processes that leave at different times, or with live buffers, may abort after their work is done."""
    if accelerator.num_processes > 1:
        accelerator.free_memory()
        gc.collect()
        accelerator.wait_for_everyone()
        accelerator.end_training()


@contextlib.contextmanager
def processor_settings(threads: int | None) -> Iterator[None]:
    """Denormal numbers, which slow a processor down many times, count as zero; and so many threads."""
    flushed = float(torch.tensor(1e-310, dtype=torch.float64) * 1) == 0
    before = torch.get_num_threads()
    torch.set_flush_denormal(True)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)
        torch.set_num_threads(before)
