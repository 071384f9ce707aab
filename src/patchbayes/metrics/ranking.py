"""Examples in the order of their confidence, where equal confidences share their places."""

import torch
from torch import Tensor


class Ranking:
    """Running totals over examples in descending order of confidence (B,), for many resampled data sets at once.

    Examples of equal confidence form one group, within which totals grow evenly: the average over all orders of the equal
    ones, so that no result depends on the order in which the examples came.
    """

    def __init__(self, confidence: Tensor) -> None:
        self.order = confidence.argsort(descending=True, stable=True)
        self.group = torch.unique_consecutive(confidence[self.order], return_inverse=True)[1]

    def totals(self, counts: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Running number of examples and running sum of values after each group, both (R, G + 1) from 0 on.

        counts (R, B): how often each example comes, values (R, B) or (1, B).
        """
        number = counts[:, self.order]
        sums = number * values[:, self.order]
        groups = int(self.group[-1]) + 1
        if groups < len(self.group):
            number, sums = (v.new_zeros(len(v), groups).index_add(1, self.group, v) for v in (number, sums))
        return tuple(torch.nn.functional.pad(v.cumsum(1), (1, 0)) for v in (number, sums))  # type: ignore[return-value]


def at_positions(number: Tensor, sums: Tensor, positions: Tensor) -> Tensor:
    """The running sum after the first `positions` (P,) examples, (R, P); fractions of an example count by their share.

    number, sums (R, G + 1): as `Ranking.totals` gives them.
    """
    positions = positions.to(number).expand(len(number), -1).contiguous()
    after = torch.searchsorted(number, positions).clamp(1, number.shape[1] - 1)
    start, stop = number.gather(1, after - 1), number.gather(1, after)
    below, above = sums.gather(1, after - 1), sums.gather(1, after)
    share = (positions - start) / (stop - start).clamp_min(1)
    return below + share * (above - below)
