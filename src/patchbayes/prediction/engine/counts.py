"""Counts that decide how a network is run: arithmetic, bytes and operations. Nothing here looks at a clock."""

import functools
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

# Draws are run together while one operation makes at most this many bytes for all of them: beyond it the values leave the
# cache, and one draw after the other is faster. Fewer than _FEWEST together gain nothing over one after the other.
_TOGETHER_BYTES = 3 * 2**19
_FEWEST = 8
_MOST = 512

# What a forward pass is made of, in seconds of an ordinary core; only ratios matter, and only roughly.
_PER_OPERATION, _PER_FLOP, _PER_BYTE = 8e-6, 1 / 3e10, 1 / 8e9
_CAPTURE_PER_OPERATION, _CAPTURE = 2.5e-3, 0.1

# What running a stage costs, in small operations: for one draw by itself besides them; for several at once besides them, and
# for each of them. So at least six draws pay for that.
_RUN, _VMAP, _RULE = 4, 10, 4
FEWEST_AT_ONCE = 6

_SHARE_OF_FREE_MEMORY = 0.25

_VIEWS = frozenset(
    ("reshape", "view", "permute", "transpose", "unsqueeze", "squeeze", "select", "slice", "expand", "getitem", "t",
     "flatten", "unflatten", "alias", "detach", "chunk", "split", "unbind", "sym_size", "movedim", "to", "contiguous", "get")
)  # fmt: skip


def sizes(value: Tensor) -> list[int]:
    """The shape of a node's value, with those of the example where they may vary; of a nested tensor its rows together."""
    if value.is_nested:  # torch's own encoder leaves out padding in this way
        return [value.numel() // max(value.size(-1), 1), value.size(-1)]
    return [size if isinstance(size, int) else int(size.node.hint or 1) for size in value.shape]


def numel(value: Any) -> int:
    """Elements of the tensors in a node's value, sizes that may vary as in the example."""
    if isinstance(value, Tensor):
        return math.prod(sizes(value))
    return sum(map(numel, value)) if isinstance(value, tuple | list) else 0


def size_in_bytes(value: Any) -> int:
    """Bytes of the tensors in a node's value."""
    if isinstance(value, Tensor):
        return numel(value) * value.element_size()
    return sum(map(size_in_bytes, value)) if isinstance(value, tuple | list) else 0


def is_view(node: fx.Node) -> bool:
    """Whether a node makes no new values."""
    return name_of(node) in _VIEWS


def name_of(node: fx.Node) -> str:
    """aten.conv2d.default is "conv2d"."""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def flops(node: fx.Node) -> int:
    """Multiplications and additions of matrix products and convolutions; 0 for all else."""
    name = name_of(node)
    rule = _RULES.get(name)
    if node.op != "call_function" or rule is None:
        return 0
    return int(rule(numel(node.meta.get("val")), _shapes(node.args)))


def _shapes(arguments: Any) -> list[Any]:
    """The shapes of the tensors, nodes and sequences of them among the arguments of an operation."""
    found: list[Any] = []
    for argument in arguments:
        value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
        if isinstance(value, Tensor):
            found.append(sizes(value))
        elif isinstance(argument, fx.Node | tuple | list):
            found.append(_shapes(argument) if not isinstance(argument, fx.Node) else [])
    return found


def _recurrent(made: int, shapes: Any) -> int:
    steps = math.prod(shapes[0][:-1])
    return 2 * steps * sum(math.prod(weight) for weight in shapes[-1] if len(weight) > 1)


_RULES: dict[str, Any] = {
    "linear": lambda made, shapes: 2 * made * shapes[1][-1],
    **dict.fromkeys(("mm", "bmm", "matmul"), lambda made, shapes: 2 * made * shapes[0][-1]),
    **dict.fromkeys(("addmm", "baddbmm"), lambda made, shapes: 2 * made * shapes[1][-1]),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "convolution"), lambda made, shapes: 2 * made * math.prod(shapes[1][1:])
    ),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        lambda made, shapes: 2 * math.prod(shapes[0]) * math.prod(shapes[1][1:]),
    ),
    **dict.fromkeys(
        ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        lambda made, shapes: 4 * math.prod(shapes[0]) * shapes[1][-2],
    ),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "multi_head_attention_forward": lambda made, shapes: made * (8 * shapes[0][-1] + 4 * shapes[1][0]),
}


@dataclass(frozen=True)
class Cost:
    """Of some operations for one draw, with the sizes of the example.

    made   how many of the operations make new values, `bytes`: of these values.
    """

    operations: int = 0
    made: int = 0
    flops: int = 0
    bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.operations + other.operations,
            self.made + other.made,
            self.flops + other.flops,
            self.bytes + other.bytes,
        )

    def at_once(self, scale: float, limit: float = math.inf) -> int:
        """How many draws to run at once, on arguments that are `scale` times as large as the example's, when their values may
        take `limit` bytes: 1 (one after the other) or at least 8."""
        whole = max(scale * self.bytes, 1)
        number = int(min(_MOST, _TOGETHER_BYTES * max(self.made, 1) / whole, limit / whole))
        return number if number >= _FEWEST else 1

    def seconds(self, draws: int, scale: float) -> float:
        """Of so many draws, in the sense of `Work.seconds`: one after the other, or at once where that is faster."""
        apart, at_once = draws * (self.operations + _RUN), _VMAP + _RULE * self.operations
        calls = min(apart, at_once) if FEWEST_AT_ONCE <= draws <= self.at_once(scale) else apart
        return calls * _PER_OPERATION + draws * scale * (self.flops * _PER_FLOP + self.bytes * _PER_BYTE)


class Work(TorchFunctionMode):
    """Counts what a forward pass does on arguments of `size` numbers: operations, flops and bytes made.

    As the network calls them, not as torch dispatches them: that would load the compiler, which takes a second.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.operations = self.flops = self.bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [one for one in (made if isinstance(made, tuple | list) else (made,)) if isinstance(one, Tensor)]
        if tensors:
            name = getattr(func, "__name__", "").removeprefix("__").removesuffix("__")
            rule = _RULES.get(name)
            self.operations += 1
            self.flops += int(rule(tensors[0].numel(), _shapes(args))) if rule is not None else 0
            self.bytes += sum(tensor.nbytes for tensor in tensors) if name not in _VIEWS else 0
        return made

    def seconds(self, size: int) -> float:
        """Of a pass on `size` numbers, by a core that nobody measured: comparable with those of a capture, no more."""
        return self.operations * _PER_OPERATION + (self.flops * _PER_FLOP + self.bytes * _PER_BYTE) * size / self.size

    @property
    def seconds_of_capture(self) -> float:
        """Of capturing the network, in the same sense."""
        return _CAPTURE + self.operations * _CAPTURE_PER_OPERATION


def default_memory_limit(device: torch.device | None) -> int:
    """A quarter of the memory that is free on the device, looked up at most once a second."""
    return int(_SHARE_OF_FREE_MEMORY * _free_memory(device, int(time.monotonic())))


@functools.lru_cache(maxsize=1)
def _free_memory(device: torch.device | None, _second: int) -> int:
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    information = Path("/proc/meminfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 2**32
