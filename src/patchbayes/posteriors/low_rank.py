"""Low-rank components: a layer's weights plus a product of two thin matrices for each component."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import NotASite, PatchbayesError
from .method import Method
from .posterior import Groups, Posterior, Role, SiteDraw, own_parameters, root_mean_square
from .rank_one import centered_noise, check_components, check_jitter, weight_of


@dataclass(frozen=True)
class LowRank(Method):
    """K components W_k = W + B_k A_k of a linear or convolution layer, K rank (out + in) numbers beside W itself.

    rank         of each B_k A_k; a layer with fewer inputs or outputs is skipped.
    components   K; a draw takes one of them for the whole layer.
    jitter       root mean square of the B_k A_k at the start, as a multiple of that of W; they average to 0.

    The bias is not random.
    """

    rank: int = 4
    components: int = 5
    jitter: float = 0.1

    default_sites = "linear+conv"
    start_fields = ("jitter",)

    def __post_init__(self) -> None:
        check_components("LowRank", self.components)
        check_jitter("LowRank", self.jitter)
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise PatchbayesError(f"LowRank(rank={self.rank!r}): expected a whole number of at least 1.")

    @property
    def label(self) -> str:
        return f"LowRank({self.rank}, {self.components})"

    def posterior(self, module: nn.Module, generator: torch.Generator) -> "LowRankPosterior":
        names = weight_of("LowRank", module)
        shape = own_parameters(module)["weight"].shape
        largest = min(shape[0], shape[1:].numel())
        if self.rank > largest:
            raise NotASite(f"rank {self.rank} is above the layer's size: its weights have a rank of at most {largest}")
        return LowRankPosterior(self, module, names)


class LowRankPosterior(Posterior):
    """The thin matrices of one layer, whose weight stays where it is: `left` (K, out, rank), `right` (K, rank, in)."""

    method: LowRank

    def __init__(self, method: LowRank, layer: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__(method, layer, names)
        self.num_components = method.components
        (self._name,) = names
        self.left: nn.Parameter | None
        self.right: nn.Parameter | None
        self.register_parameter("left", None)
        self.register_parameter("right", None)

    def groups(self) -> Groups | None:
        return Groups(1, self.method.components) if self.method.components > 1 else None

    def start_(self, values: Mapping[str, Tensor], generator: torch.Generator) -> None:
        weight = values[self._name]
        rows, columns = weight.shape[0], weight[0].numel()
        components, rank = self.method.components, self.method.rank
        size = self.method.jitter * root_mean_square(self._name, values) / rank**0.5
        right = torch.randn(1, rank, columns, generator=generator).expand(components, -1, -1)  # equal: the mean stays
        started = {"left": size * centered_noise((components, rows, rank), generator), "right": right}
        for side, value in started.items():
            known = getattr(self, side)
            if known is None:
                learned = self.layer._parameters[self._name].requires_grad
                setattr(self, side, nn.Parameter(value.to(weight).clone(), requires_grad=learned))
            else:
                known.data.copy_(value)

    def realize(self, d: SiteDraw) -> dict[str, Tensor]:
        left, right = self._sides
        if self.method.components == 1:
            return self.component(0)
        which = d["z"][..., :1].to(left.device)
        product = left.index_select(0, which)[0] @ right.index_select(0, which)[0]
        return {self._name: self._weight + product.reshape(self._weight.shape)}

    def mean(self) -> dict[str, Tensor]:
        return {self._name: self._weight + self._average()}

    def component(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < self.method.components:
            raise PatchbayesError(
                f"component {number}: this site has the components 0 to {self.method.components - 1}."
            )
        left, right = self._sides
        return {self._name: self._weight + (left[number] @ right[number]).reshape(self._weight.shape)}

    @torch.no_grad()
    def scale_spread_(self, factor: float) -> None:
        """W takes what the average of the products loses, so that the mean stays; at the start that is rounding alone, and W
        is left as it is."""
        lost, weight = (1 - factor) * self._average(), self._weight
        if bool(lost.abs().max() > torch.finfo(weight.dtype).eps * weight.abs().max()):
            weight.add_(lost)
        self._sides[0].mul_(factor)

    def expected_squares(self) -> dict[str, Tensor]:
        squares = [self.component(k)[self._name].square().sum() for k in range(self.method.components)]
        return {self._name: torch.stack(squares).mean()}

    def roles(self) -> dict[str, Role]:
        return {"left": "law", "right": "law"}

    def _average(self) -> Tensor:
        left, right = self._sides
        return torch.einsum("kor,kri->oi", left, right).div(self.method.components).reshape(self._weight.shape)

    @property
    def _weight(self) -> Tensor:
        weight = self.layer._parameters[self._name]
        assert isinstance(weight, Tensor)
        return weight

    @property
    def _sides(self) -> tuple[Tensor, Tensor]:
        assert self.left is not None
        assert self.right is not None
        return self.left, self.right
