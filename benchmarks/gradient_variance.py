"""How much estimates of the gradient of learned mixing probabilities vary: EMP on two layers of a small network.

At equal numbers of passes: the variance of each estimate is multiplied by the passes it takes. All are unbiased (tests).

    python benchmarks/gradient_variance.py
"""

import argparse
from collections.abc import Callable

import torch
from records import write_record
from torch import Tensor, nn

import patchbayes as pb
from patchbayes.patching.assignment import site_by_site

COMPONENTS = 5


def network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / max(parameter.shape[-1], 1) ** 0.5
    rules = pb.EMP(COMPONENTS, jitter=0.5, learn_probabilities=True)
    pb.patch_(model, rules, "norm+output", generator=generator)
    return model, (torch.randn(64, 8, generator=generator), torch.randint(3, (64,), generator=generator))


def gradient(model: nn.Module, data: tuple[Tensor, Tensor], draws: int | pb.Draws) -> Tensor:
    logits = [site.posterior.logits for site in pb.patched_sites(model).values()]
    outputs = pb.forward_draws(model, data[0], draws)
    loss = pb.objective.negative_elbo(outputs, data[1], 0.0, num_data=1)
    return torch.cat(torch.autograd.grad(loss, logits))  # type: ignore[arg-type]


def without_baseline(model: nn.Module, data: tuple[Tensor, Tensor], generator: torch.Generator) -> Tensor:
    """log p(y | x, z) times the score of z, of one draw."""
    one = pb.Draws.sample(model, 1, generator)
    with torch.no_grad(), pb.use_draw(model, one):
        loss = nn.functional.cross_entropy(model(data[0]), data[1])
    sites = pb.patched_sites(model).values()
    scores = [
        nn.functional.one_hot(z, COMPONENTS) - torch.softmax(site.posterior.logits.detach(), 0)  # type: ignore[arg-type]
        for site, z in zip(sites, one.assignments()[0], strict=True)
    ]
    return loss * torch.cat(scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=400)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    model, data = network()
    generator = torch.Generator().manual_seed(1)
    estimates: dict[str, tuple[int, Callable[[], Tensor]]] = {
        "one draw, no baseline": (1, lambda: without_baseline(model, data, generator)),
        "two draws, each the other's baseline": (2, lambda: gradient(model, data, 2)),
        "eight draws, the others as baseline": (8, lambda: gradient(model, data, 8)),
        "one layer at a time over all its components": (
            2 * COMPONENTS,
            lambda: gradient(model, data, site_by_site(model, generator)),
        ),
        "all networks": (COMPONENTS**2, lambda: gradient(model, data, pb.Draws.enumerate(model))),
    }
    rows = []
    for title, (passes, estimate) in estimates.items():
        found = torch.stack([estimate() for _ in range(3 if title == "all networks" else repeats)]).double()
        rows.append(
            {"title": title, "passes": passes, "variance": float(found.var(0).sum()), "mean": found.mean(0).tolist()}
        )
    plain = rows[0]["variance"]
    for row in rows:
        row["relative"] = row["variance"] * row["passes"] / plain  # type: ignore[operator]
        print(row["title"], row["relative"], [round(x, 4) for x in row["mean"][:5]])  # type: ignore[index]
    write_record("gradient_variance", {"repeats": repeats, "components": COMPONENTS, "rows": rows})


if __name__ == "__main__":
    main()
