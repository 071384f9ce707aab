"""Two posteriors as a user would write them, outside the package: factors of rank one, and probabilities that are learned."""

from dataclasses import dataclass

import torch
from torch import nn

from patchbayes.errors import NotASite, PatchbayesError
from patchbayes.posteriors import KL, Groups, Method, Posterior


@dataclass(frozen=True)
class OuterScales(Method):
    """W_k = W * (r_k s_k^T): K pairs of vectors on a shared matrix, one pair drawn for the layer; the bias stays."""

    components: int = 4
    jitter: float = 0.1
    start_fields = ("jitter",)
    random_at_start = False

    def without_spread(self):
        return OuterScales(self.components, jitter=0.0)

    def posterior(self, module, generator):
        if not isinstance(module, nn.Linear):
            raise NotASite("it is no linear layer")
        return OuterScalesPosterior(self, module, ("weight",))


class OuterScalesPosterior(Posterior):
    def groups(self):
        return Groups(1, self.method.components)

    def start_(self, values, generator):
        number, weight = self.method.components, values["weight"]
        for name, size in zip(("rows", "columns"), weight.shape, strict=True):
            start = 1 + self.method.jitter * torch.randn(number, size, generator=generator, device=generator.device)
            if hasattr(self, name):
                getattr(self, name).data.copy_(start)
            else:
                learned = self.layer._parameters["weight"].requires_grad
                setattr(self, name, nn.Parameter(start.to(weight), requires_grad=learned))

    def factors(self):  # (K, out, in)
        return self.rows.unsqueeze(2) * self.columns.unsqueeze(1)

    def realize(self, d):
        rows, columns = self.rows.index_select(0, d["z"])[0], self.columns.index_select(0, d["z"])[0]
        return {"weight": self.layer._parameters["weight"] * torch.outer(rows, columns)}

    def apply_to(self, layer, args, kwargs, d):
        if d is None:
            return self.run(layer, args, kwargs)
        (x,) = (*args, *kwargs.values())
        rows, columns = self.rows.index_select(0, d["z"])[0], self.columns.index_select(0, d["z"])[0]
        output = nn.functional.linear(x * columns, layer._parameters["weight"]) * rows
        return output if layer.bias is None else output + layer.bias

    def mean(self):
        return {"weight": self.layer._parameters["weight"] * self.factors().mean(0)}

    def expected_squares(self):
        squares = (self.layer._parameters["weight"] * self.factors()).square().flatten(1).sum(1)
        return {"weight": squares.mean()}

    def roles(self):
        return {"rows": "law", "columns": "law"}


@dataclass(frozen=True)
class LearnedLaw(Method):
    """K components of all parameters, one drawn for the layer with probabilities p = softmax(logits) that are learned."""

    components: int = 3
    jitter: float = 0.1
    start_fields = ("jitter",)
    random_at_start = False

    def without_spread(self):
        return LearnedLaw(self.components, jitter=0.0)

    def posterior(self, module, generator):
        return LearnedLawPosterior(self, module, tuple(n for n, p in module._parameters.items() if p is not None))


class LearnedLawPosterior(Posterior):
    def __init__(self, method, layer, names):
        super().__init__(method, layer, names)
        self.num_components = method.components
        self.values = nn.ParameterDict()
        self.logits = nn.Parameter(torch.zeros(method.components))

    def groups(self):
        return Groups(1, self.method.components)

    def log_p(self):
        return self.logits.double().log_softmax(0)

    def start_(self, values, generator):
        for name in self.names:
            steps = torch.randn(
                self.method.components, *values[name].shape, generator=generator, device=generator.device
            )
            steps[0] = 0
            self.take_(self.values, name, values[name] + self.method.jitter * steps.to(values[name]))
        self.logits.data = self.logits.data.to(values[self.names[0]])

    def realize(self, d):
        """The gradient of p goes straight through the draw; the added term is zero."""
        p = self.logits.softmax(0)
        return {
            name: v.index_select(0, d["z"])[0] + torch.tensordot(p - p.detach(), v, 1)
            for name, v in self.values.items()
        }

    def mean(self):
        p = self.logits.softmax(0)
        return {name: v[0] + torch.tensordot(p, v - v[0], 1) for name, v in self.values.items()}

    def component(self, number):
        if not 0 <= number < self.num_components:
            raise PatchbayesError(f"component {number}: expected 0 to {self.num_components - 1}.")
        return {name: value[number] for name, value in self.values.items()}

    def expected_squares(self):
        p = self.logits.softmax(0)
        return {name: (p * v.square().flatten(1).sum(1)).sum() for name, v in self.values.items()}

    def kl(self, prior, d=None):
        """Eqs. (2) and (6), and KL(p || uniform), which the learned p adds."""
        p = self.logits.softmax(0)
        known = super().kl(prior, d)
        return KL(known.value + (p * (p * len(p)).log()).sum(), known.kind)

    def roles(self):
        return super().roles() | {"logits": "law"}
