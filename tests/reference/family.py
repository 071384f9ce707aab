"""The variational family of Eq. (1), at sigma = 0, for one tie after the other.

    W = sum_k 1[Z = k] * M_k

Z has the shape of W. A tie says which elements of Z are the same random variable: `groups` numbers, for every element,
the categorical variable it follows. All members of table 2 are then one function.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass
class Parameter:
    """components (K, *shape); groups (*shape) of integers, or None for a parameter that is not mixed."""

    components: np.ndarray
    groups: np.ndarray | None

    def realize(self, z: np.ndarray) -> np.ndarray:
        """The parameter under the assignment z of all groups. Component K is zero."""
        if self.groups is None:
            return self.components[0]
        chosen = z[self.groups]
        with_zero = np.concatenate([self.components, np.zeros_like(self.components[:1])])
        return sum((chosen == k) * component for k, component in enumerate(with_zero))

    def scatter(self, z: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        """The gradient of the components, from the gradient of the realized parameter."""
        if self.groups is None:
            return gradient[None]
        return np.stack([(z[self.groups] == k) * gradient for k in range(len(self.components))])


def assignments(probabilities: list[tuple[float, ...]]) -> Iterator[tuple[np.ndarray, float]]:
    """Every assignment of the groups with its probability; probabilities[g] are those of group g."""
    for z in itertools.product(*(range(len(p)) for p in probabilities)):
        yield np.array(z, dtype=int), float(np.prod([p[k] for p, k in zip(probabilities, z, strict=True)]))


def number_groups(units: dict[str, np.ndarray], tie: str, first: int) -> tuple[dict[str, np.ndarray], int]:
    """Groups of the parameters of one layer, numbered from `first`, and the next free number.

    units[name] (*shape) says which input unit every element multiplies.
    """
    groups = {}
    following = first
    for name, unit in units.items():
        if tie in ("network", "site"):
            groups[name] = np.full(unit.shape, first)
            following = first + 1
        elif tie == "unit":
            groups[name] = following + unit
            following += int(unit.max()) + 1
        elif tie == "element":
            groups[name] = following + np.arange(unit.size).reshape(unit.shape)
            following += unit.size
        else:
            raise ValueError(tie)
    return groups, following


def linear_units(outputs: int, inputs: int) -> np.ndarray:
    """weight (outputs, inputs): column h multiplies input h."""
    return np.broadcast_to(np.arange(inputs), (outputs, inputs)).copy()


def conv_units(outputs: int, inputs: int, kernel: tuple[int, ...], groups: int = 1) -> np.ndarray:
    """weight (outputs, inputs / groups, *kernel): block g of the outputs sees block g of the input channels."""
    units = np.zeros((outputs, inputs // groups, *kernel), dtype=int)
    for o in range(outputs):
        for i in range(inputs // groups):
            units[o, i] = (o * groups // outputs) * (inputs // groups) + i
    return units


def transposed_conv_units(inputs: int, outputs: int, kernel: tuple[int, ...]) -> np.ndarray:
    """weight (inputs, outputs, *kernel): row h multiplies input channel h."""
    return np.broadcast_to(np.arange(inputs).reshape(-1, 1, *[1] * len(kernel)), (inputs, outputs, *kernel)).copy()


def row_units(rows: int, columns: int) -> np.ndarray:
    """An embedding is a linear map of a one-hot input: row h is the column of input h."""
    return np.broadcast_to(np.arange(rows)[:, None], (rows, columns)).copy()


def elementwise_units(*shape: int) -> np.ndarray:
    """An affine norm multiplies every normalized input by a weight of its own."""
    return np.arange(int(np.prod(shape))).reshape(shape)


def constant_unit(*shape: int) -> np.ndarray:
    """A bias is the column of the constant input 1."""
    return np.zeros(shape, dtype=int)
