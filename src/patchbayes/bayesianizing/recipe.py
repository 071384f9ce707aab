"""bayesianize_: patch a trained network, learn how far its draws spread, and how sharp their average is."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from ..likelihoods import Likelihood
from ..patching.network import Site, network_of
from ..patching.patch import is_patched, patch_, patched_sites, unpatch_
from ..patching.report import PatchReport
from ..patching.selection import Sites
from ..posteriors.method import Method
from ..posteriors.spread import Spread
from ..prediction.batches import as_tensor
from ..views import Views
from .calibrate import BATCH, Calibration, affordable_examples, check_numbers
from .held_out import HeldOut, Select, select_for, to_device
from .layers import NORMS, candidate_layers
from .progress import shown
from .report import BayesianizeReport
from .restoring import with_record
from .spread import slope_
from .tries import Tries, digest_of

#: The part of the budget for a look at each set of layers, where there are several.
_LOOK = 0.2
#: Inputs through the network, at most, to find its layers and patch each set of them: two at a time.
_LAYER_PASSES = 2 * 8


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
    tolerance: float = 0.0,
    progress: Callable[[str, float], None] | None = None,
    keep_tries: Path | None = None,
) -> BayesianizeReport:
    """Turn a trained network into a calibrated Bayesian one, in place, with held-out data alone.

    Patch it, learn how far the draws spread at each site, and fit a temperature to their average (see `calibrate_`). The mean
    network stays the one given: nothing is trained, and with no spread the result is temperature scaling.

    held_out      batches that the network was not trained on, readable twice, of any form that `calibrate_` reads.
    method        `Spread()` by default: a number for each parameter is all that it adds. Or any method whose spread can be
                  scaled, such as ECMP(5, jitter=0.05); its jitter is where the search starts.
    sites         "auto": the norm layers, with a spread that falls with the depth; where there are fewer than twelve, the first
                  convolution and linear layers in the order of execution are tried too, and the held-out data choose. Always
                  as many as stay within a tenth of the network or 200 kB. Else as in `patch_`.
    predict_cost  at most so many passes of the unpatched network for all `draws` draws: the sites are then the last layers,
                  since everything before the first of them is computed once for all draws.
    draws, budget, examples, likelihood, seed, select, output, views, tolerance, progress   as in `calibrate_`; the likelihood
                  is Categorical() if not given.
    keep_tries    a file that holds what was tried: the same call, after it was killed, goes on from there, to the same result.

    Where draws are no better than the temperature alone, the network is left without patches, as `calibrate_` leaves one that
    had none: `predict` then takes one pass, and the file holds the temperature. (Components that do not average to the given
    network, as those of ECMP, stay, all at their mean.)

    Modes, frozen flags and everything outside the sites come back as they were; after an error or an interruption before
    anything was learned the whole network does. Save the result with `patchbayes.save`.
    """
    if not isinstance(model, nn.Module):
        raise PatchbayesError(f"bayesianize_: expected a torch.nn.Module, got a {type(model).__name__}.")
    if is_patched(model):
        raise PatchbayesError(
            "bayesianize_: the network is patched already.\n  do       calibrate_(model, held_out), or unpatch_(model) first."
        )
    check_numbers(draws, budget, examples, tolerance)
    if predict_cost is not None and sites != "auto":
        raise PatchbayesError("bayesianize_: predict_cost chooses the sites; give one of the two.")
    generator = torch.Generator().manual_seed(seed)
    examples = affordable_examples(examples, budget, views, draws)
    chosen = HeldOut.read(held_out, examples, BATCH, generator, select or select_for(model))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    example = to_device(chosen.first(2).batches[0][0], device)  # more would be passes that nobody counts
    model_bytes = _bytes(model.parameters()) + _bytes(model.buffers())
    method = method if method is not None else Spread()
    sets: dict[str, Sites] = {"": "norm+output" if sites == "auto" else sites}
    layers: dict[str, set[str]] = {}
    if sites == "auto" and not isinstance(method, Mapping):
        layers = candidate_layers(model, example, model_bytes, method.copies, predict_cost, draws)
        sets = {title: _among(names) for title, names in layers.items()}

    def patched(title: str) -> tuple[PatchReport, Calibration]:
        report = patch_(
            model,
            method,
            sets[title],
            example_input=example,
            likelihood=likelihood,
            generator=torch.Generator().manual_seed(start),
        )
        network = network_of(model)
        if title == NORMS:
            slope_(network)
        return report, Calibration(
            model, network, chosen, network.likelihood, draws, budget, output or as_tensor, tell, views, title, tries
        )

    options = (str(method), {title: sorted(names) for title, names in layers.items()}, str(sites), draws, budget, seed)
    described = (*options, str(likelihood), None if views is None else str(views))
    tries = Tries(keep_tries, digest_of(model, chosen, *described)) if keep_tries is not None else None
    start = int(torch.randint(2**31, (), generator=generator))
    try:
        with shown(progress) as tell:
            titles, scored, earlier = list(sets), dict[str, float](), None
            for title in titles if len(titles) > 1 else ():
                _, calibration = patched(title)
                if earlier is not None:
                    calibration.follow(earlier)
                calibration.passes += _LAYER_PASSES
                scored[title], earlier = calibration.look(_LOOK), calibration
                unpatch_(model, keep=0)
                if calibration.stopped:
                    break
            best = min(titles, key=lambda title: scored.get(title, math.inf))
            report, calibration = patched(best)
            is_given = all(map(_is_around_its_start, patched_sites(model).values()))
            if earlier is not None:
                calibration.follow(earlier)
            calibration.passes += _LAYER_PASSES
            found = calibration.run("learn", tolerance, try_start=False)
            if found.chosen == "none" and is_given:
                _without_sites_(model)
    except BaseException:
        if is_patched(model):
            unpatch_(model, keep=0)
        raise
    return BayesianizeReport(
        patch=report,
        calibration=found,
        patch_bytes=sum(_bytes(site.parameters().values()) for site in patched_sites(model).values()),
        model_bytes=model_bytes,
        call='patchbayes.save(model, "patch.safetensors"); elsewhere patchbayes.load_(network, "patch.safetensors")',
    )


@torch.no_grad()
def _is_around_its_start(site: Site) -> bool:
    """Whether the mean of a fresh site is the layer that was patched."""
    mean, given = site.posterior.mean(), site.posterior.component(0)
    return all(torch.equal(mean[name], given[name]) for name in site.posterior.names)


def _without_sites_(model: nn.Module) -> None:
    """Leave the mean network with its temperatures: draws that do not differ would cost a pass each."""
    network = network_of(model)
    unpatch_(model, keep="mean")
    with with_record(model) as (_, record):
        record.likelihood, record.calibration = network.likelihood, network.calibration


def _among(names: set[str]) -> Callable[[str, nn.Module], bool]:
    return lambda name, _module: name in names


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
