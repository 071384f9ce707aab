"""bayesianize_: patch a trained network, learn how far its draws spread, and how sharp their average is."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from ..layers import is_norm
from ..likelihoods import Likelihood
from ..patching.network import network_of
from ..patching.patch import is_patched, patch_, patched_sites, unpatch_
from ..patching.selection import Sites
from ..posteriors.method import Method
from ..posteriors.spread import Spread
from ..views import Views
from .calibrate import BATCH, Calibration, as_tensor, check_numbers, shown
from .held_out import HeldOut, Select, select_for, to_device
from .layers import affordable_layers
from .report import BayesianizeReport
from .spread import slope_


def bayesianize_(
    model: nn.Module,
    held_out: Iterable[Any],
    *,
    method: Method | Mapping[Sites, Method] | None = None,
    sites: Sites | Literal["auto"] = "auto",
    predict_cost: float | None = None,
    draws: int = 20,
    budget: int = 40_000,
    examples: int = 1500,
    likelihood: Likelihood | None = None,
    seed: int = 0,
    select: Select | None = None,
    output: Callable[[Any], Tensor] | None = None,
    views: Views | Callable[[Any, torch.Generator], Any] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> BayesianizeReport:
    """Turn a trained network into a calibrated Bayesian one, in place, with held-out data alone.

    Patch it, learn how far the draws spread at each site, and fit a temperature to their average (see `calibrate_`). The mean
    network stays the one given: nothing is trained, and with no spread the result is temperature scaling.

    held_out      batches that the network was not trained on, readable twice, of any form that `calibrate_` reads.
    method        `Spread()` by default: a number for each parameter is all that it adds. Or any method whose spread can be
                  scaled, such as ECMP(5, jitter=0.05); its jitter is where the search starts.
    sites         "auto": the norm layers, with a spread that falls with the depth; where there are fewer than three, the first
                  convolution and linear layers in the order of execution. Always as many as stay within a tenth of the
                  network or 200 kB. Else as in `patch_`.
    predict_cost  at most so many passes of the unpatched network for all `draws` draws: the sites are then the last layers,
                  since everything before the first of them is computed once for all draws.
    draws, budget, examples, likelihood, seed, select, output, views, progress   as in `calibrate_`; the likelihood is
                  Categorical() if not given.

    Modes, frozen flags and everything outside the sites come back as they were; after an error or an interruption before
    anything was learned the whole network does. Save the result with `patchbayes.save`.
    """
    if not isinstance(model, nn.Module):
        raise PatchbayesError(f"bayesianize_: expected a torch.nn.Module, got a {type(model).__name__}.")
    if is_patched(model):
        raise PatchbayesError(
            "bayesianize_: the network is patched already.\n  do       calibrate_(model, held_out), or unpatch_(model) first."
        )
    check_numbers(draws, budget, examples)
    if predict_cost is not None and sites != "auto":
        raise PatchbayesError("bayesianize_: predict_cost chooses the sites; give one of the two.")
    generator = torch.Generator().manual_seed(seed)
    chosen = HeldOut.read(held_out, examples, BATCH, generator, select or select_for(model))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    example = to_device(chosen.batches[0][0], device)
    model_bytes = _bytes(model.parameters()) + _bytes(model.buffers())
    method = method if method is not None else Spread()
    sloping = False
    if sites == "auto" and not isinstance(method, Mapping):
        names = affordable_layers(model, example, model_bytes, method.copies, predict_cost, draws)
        sloping = any(is_norm(module) for name, module in model.named_modules() if name in names)
        sites = lambda name, _module: name in names  # noqa: E731
    report = patch_(
        model,
        method,
        "norm+output" if sites == "auto" else sites,
        example_input=example,
        likelihood=likelihood,
        generator=generator,
    )
    try:
        network = network_of(model)
        if sloping:
            slope_(network)
        with shown(progress) as tell:
            calibration = Calibration(
                model, network, chosen, network.likelihood, draws, budget, output or as_tensor, tell, views
            ).run("learn")
    except BaseException:
        unpatch_(model, keep=0)
        raise
    return BayesianizeReport(
        patch=report,
        calibration=calibration,
        patch_bytes=sum(_bytes(site.parameters().values()) for site in patched_sites(model).values()),
        model_bytes=model_bytes,
        call='patchbayes.save(model, "patch.safetensors"); elsewhere patchbayes.load_(network, "patch.safetensors")',
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
