"""The local form of element-wise draws: a linear layer's outputs are drawn, not its weights (Kingma et al., 2015)."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..draws.randomness import fold, normal_like
from ..errors import NotASite, PatchbayesError
from .posterior import Posterior, SiteDraw

#: What a draw is: the weights of the layer, or for every example outputs of the same mean and variance.
Form = Literal["weights", "local"]


class LocalForm(Posterior):
    """Put before a posterior whose elements are independent: under a draw, every example gets outputs of its own,

        y = E[W] x + E[b] + sqrt(Var[W] x^2 + Var[b]) * eps,   eps standard normal for each output and example

    Mean and variance of each output are those of drawn weights exactly; its law is theirs where weights are Gaussian, and
    close to it where many inputs add up. Outputs of one input are independent, as those of drawn weights are. But two inputs
    (or two tokens of one) do not see the same weights: a draw is no function, and what needs one refuses it.

    All draws share the two products: in prediction they cost one pass and the noise.
    """

    joint = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.noise = "example"
        self.noise_source = "outputs drawn for every example, the local form"

    def groups(self) -> None:
        return None

    def draw(self, z: Tensor, keys: Tensor) -> SiteDraw:
        return Posterior.draw(self, z, keys)

    def realize(self, d: SiteDraw) -> dict[str, Tensor]:
        return self.mean()

    def realize_several(self, d: SiteDraw) -> dict[str, Tensor]:
        return {name: mean.expand(len(d["key"]), *mean.shape) for name, mean in self.mean().items()}

    def apply_to(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], d: SiteDraw | None) -> Any:
        output = self.run(layer, args, kwargs, self.mean())
        if d is None:
            return output
        inputs, variance = args[0] if args else kwargs["input"], self.variance()
        square = F.linear(inputs.square(), variance["weight"].to(inputs), _like(variance.get("bias"), inputs))
        deviation = square.clamp_min(torch.finfo(square.dtype).tiny).sqrt()  # at 0 a root has no derivative
        keys = fold(self.example_keys(d, output.shape[0]) if output.dim() > 1 else d["key"], self.stream)
        return output + deviation * normal_like(output, keys)


def _like(value: Tensor | None, like: Tensor) -> Tensor | None:
    return None if value is None else value.to(like)


def check_local(layer: nn.Module) -> None:
    """Skip a layer whose outputs are not sums over its inputs with independent weights."""
    if type(layer).forward is not nn.Linear.forward or isinstance(
        layer, nn.modules.linear.NonDynamicallyQuantizableLinear
    ):
        raise NotASite('form="local" is for linear layers')


def check_form(where: str, form: str) -> None:
    """Refuse another form."""
    if form not in ("weights", "local"):
        raise PatchbayesError(f'{where}(form={form!r}): expected "weights" or "local".')
