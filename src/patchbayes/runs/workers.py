"""Worker processes for components that learn apart: shared memory, no locks, no gradients sent, nothing pickled.

A worker is told what the run is (the configuration, as JSON) and builds its network from that; the values come from shared
memory, a mapped file that all processes read and in which each writes the rows of its own components. The parent hands out
hands, one line of JSON each. A worker that dies, or makes no step for `timeout` seconds, is given up: its components are put
back to the beginning of the phase and learn again elsewhere, at last in the parent itself. Workers end with their parent,
however that ends.
"""

import collections
import json
import math
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from .config import TrainingConfig
from .disjoint_patches import HandTraining, Learned, Phase, RunningStatistics, dealt

_ALIGNMENT = 64
_POLL = 0.1  # seconds between two looks at the workers
CHANGES, STEPS, HEARTBEAT = "changes", "steps", "heartbeat"


class SharedTensors:
    """Tensors by name in one mapped file: `description` is all that another process needs to map them too."""

    def __init__(self, path: Path, described: list[tuple[str, str, list[int]]]) -> None:
        self.path, self.described = path, described
        self._tensors: dict[str, Tensor] = {}
        places, position = [], 0
        for name, dtype, shape in described:
            places.append((name, _DTYPES[dtype], shape, position))
            position += -(-math.prod(shape) * _DTYPES[dtype].itemsize // _ALIGNMENT) * _ALIGNMENT
        whole = torch.from_file(str(path), shared=True, size=max(position, _ALIGNMENT), dtype=torch.uint8)
        for name, kind, shape, start in places:
            part = whole[start : start + math.prod(shape) * kind.itemsize]
            self._tensors[name] = part.view(kind).view(shape)

    @classmethod
    def describe(cls, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str, list[int]]]:
        return [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]


_DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
}


class WorkerPool:
    """Worker processes that wait for hands. Start it with `with`; at the end of the block no process is left."""

    def __init__(
        self,
        config: TrainingConfig,
        training: HandTraining,
        statistics_size: int,
        shapes: tuple[int, tuple[int, ...]],
        *,
        trust_code: bool,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """shapes: the number of outputs and the shape of an input, of which the network is built."""
        if training.network.device not in (None, torch.device("cpu")):
            raise PatchbayesError(
                f"component_workers={config.component_workers}: worker processes share the memory of the processor, and the "
                f'network is on {training.network.device}.\n  do       device="cpu", or one rank for each GPU (torchrun) '
                "with component_workers=1."
            )
        self.config, self.training, self.statistics_size = config, training, statistics_size
        self.shapes, self.trust_code, self.say = shapes, trust_code, say
        self.processes: list[subprocess.Popen[str]] = []
        self._replies: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()

    def __enter__(self) -> Self:
        loss, number = self.training.loss, self.config.component_workers
        memory = Path("/dev/shm")
        usable = memory.is_dir() and os.access(memory, os.W_OK)
        self.folder = Path(tempfile.mkdtemp(prefix="patchbayes-", dir=memory if usable else None))
        hands = self.training.hands
        extra = {
            CHANGES: torch.zeros(hands, self.statistics_size, dtype=torch.float64),
            STEPS: torch.zeros(hands, dtype=torch.int64),
            HEARTBEAT: torch.zeros(number, dtype=torch.int64),
        }
        held = [*loss.named_parameters(), *_buffers(loss), *extra.items()]
        self.shared = SharedTensors(self.folder / "tensors", SharedTensors.describe(held))
        for name, parameter in loss.named_parameters():
            self.shared[name].copy_(parameter.detach())
            parameter.data = self.shared[name]
        description = {
            "config": self.config.to_json(),
            "num_outputs": self.shapes[0],
            "input_shape": self.shapes[1],
            "trust_code": self.trust_code,
            "threads": torch.get_num_threads(),
            "tensors": self.shared.described,
        }
        (self.folder / "description.json").write_text(json.dumps(description), encoding="utf-8")
        for worker in range(number):
            self._start(worker)
        return self

    def _start(self, worker: int) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-m", "patchbayes.runs.worker_process", str(self.folder), str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends them
        )
        self.processes.append(process)
        threading.Thread(target=self._listen, args=(worker, process), daemon=True).start()

    def _listen(self, worker: int, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._replies.put((worker, json.loads(line)))
        self._replies.put((worker, None))

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait(timeout=30)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        with torch.no_grad():
            for parameter in self.training.loss.parameters():
                parameter.data = parameter.detach().clone()
        shutil.rmtree(self.folder, ignore_errors=True)

    def train_(self, phase: Phase, statistics: RunningStatistics, stopped: Callable[[], bool]) -> list[Learned] | None:
        """Train all hands of a phase, in place; None if `stopped` before the end (then the rows are in between)."""
        shared, hands = self.shared, self.training.hands
        for name, buffer in _buffers(self.training.loss):
            shared[name].copy_(buffer)
        before = {id(p): p.detach().clone() for p in self._parameters()}
        waiting, learned = collections.deque(range(hands)), dict[int, Learned]()
        busy: dict[int, tuple[int, int, float]] = {}  # worker -> hand, heartbeat, when it was last another

        def give_up(worker: int, why: str) -> None:
            self.processes[worker].kill()
            hand = busy.pop(worker, (None, 0, 0.0))[0]
            again = "" if hand is None else f"; the components of hand {hand} learn again elsewhere"
            self.say(f"worker {worker} {why}{again}")
            if hand is not None:
                self._put_back(phase, hand, before)
                waiting.appendleft(hand)

        while len(learned) < hands:
            if stopped():
                return None
            for worker, process in enumerate(self.processes):
                if process.poll() is None and worker not in busy and waiting:
                    busy[worker] = (waiting.popleft(), -1, time.monotonic())
                    self._send(worker, {"hand": busy[worker][0], "first": phase.first, "last": phase.last})
            if not busy:  # no worker is left
                hand = waiting.popleft()
                found = self._train_here(phase, hand, statistics, stopped)
                if found is None:
                    return None
                learned[hand] = found
                continue
            try:
                worker, reply = self._replies.get(timeout=_POLL)
                if reply is not None:
                    learned[reply["hand"]] = Learned(reply["nll"], reply["steps"])
                    busy.pop(worker, None)
            except queue.Empty:
                pass
            for worker, (hand, beat, since) in list(busy.items()):
                now = int(shared[HEARTBEAT][worker])
                if self.processes[worker].poll() is not None:
                    self._replies_of_the_dead(worker, learned, busy)
                    if worker in busy:
                        give_up(worker, f"ended (exit code {self.processes[worker].returncode})")
                elif now != beat:
                    busy[worker] = (hand, now, time.monotonic())
                elif time.monotonic() - since > self.config.timeout:
                    give_up(worker, f"made no step for {self.config.timeout:g} seconds")
        return [learned[hand] for hand in range(hands)]

    def _replies_of_the_dead(self, worker: int, learned: dict[int, Learned], busy: dict[int, Any]) -> None:
        """A worker may end after it has answered: what it has said counts."""
        others = []
        while not self._replies.empty():
            who, reply = self._replies.get()
            if reply is not None and who in busy and busy[who][0] == reply["hand"]:
                learned[reply["hand"]] = Learned(reply["nll"], reply["steps"])
                busy.pop(who)
            elif reply is not None:
                others.append((who, reply))
        for item in others:
            self._replies.put(item)

    def _send(self, worker: int, line: dict[str, Any]) -> None:
        pipe = self.processes[worker].stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(line) + "\n")
            pipe.flush()
        except OSError:  # it has just ended, which the next look shows
            pass

    def _train_here(
        self, phase: Phase, hand: int, statistics: RunningStatistics, stopped: Callable[[], bool]
    ) -> Learned | None:
        statistics.begin()
        found = self.training.train_(phase, hand, lambda: not stopped())
        if found is not None:
            self.shared[CHANGES][hand], self.shared[STEPS][hand] = statistics.flat(), found.steps
        return found

    @torch.no_grad()
    def _put_back(self, phase: Phase, hand: int, before: dict[int, Tensor]) -> None:
        network, hands = self.training.network, self.training.hands
        components = dealt(network, self.config.seed, phase, hands)[hand]
        for site in network.sites:
            place = int(components[site.posterior.offset])
            for parameter in site.parameters().values():
                parameter.detach().view(hands, -1)[place] = before[id(parameter)].view(hands, -1)[place]

    def _parameters(self) -> list[nn.Parameter]:
        return [p for site in self.training.network.sites for p in site.parameters().values()]


def _buffers(loss: nn.Module) -> list[tuple[str, Tensor]]:
    return [(f"buffer.{name}", buffer) for name, buffer in loss.named_buffers()]


def take_buffers_(loss: nn.Module, shared: SharedTensors) -> None:
    """Copy the buffers of the parent's network into this process's."""
    with torch.no_grad():
        for name, buffer in _buffers(loss):
            buffer.copy_(shared[name])
