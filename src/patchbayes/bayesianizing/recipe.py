"""bayesianize_: patch a trained network, learn how far its draws spread, and how sharp their average is."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import PatchbayesError
from ..likelihoods import Likelihood
from ..patching.checkpoint import patch_tensors, remember_given_
from ..patching.network import Site, network_of
from ..patching.patch import is_patched, patch_, patched_sites, unpatch_
from ..patching.report import PatchReport
from ..patching.selection import Sites, as_tensor
from ..posteriors.method import Method
from ..posteriors.rank_one import RankOne
from ..posteriors.spread import Spread
from ..views import Views
from .calibrate import BATCH, Calibration, affordable_examples, check_numbers
from .held_out import HeldOut, Select, select_for, to_device
from .layers import BOTH, BYTES, NORMS, SHARE, Layers, candidate_layers, layers_left_out
from .progress import shown
from .report import BayesianizeReport
from .restoring import with_record
from .spread import start_norms_
from .tries import Tries, digest_of

#: The part of the budget for looks at sets of layers, where there are several.
_LOOK = 0.4
#: The method of layers that are too large for the default one.
_SMALL = RankOne()
#: Inputs through the network, at most, to find its layers and patch each set of them: two at a time.
_LAYER_PASSES = 2 * 8
#: The values that layers had before they were patched, by the layer's name and the parameter's.
Given = dict[str, dict[str, Tensor]]


def bayesianize_(
    model: nn.Module,
    held_out: Iterable[Any],
    *,
    method: Method | Mapping[Sites, Method] | None = None,
    sites: Sites | Literal["auto"] = "auto",
    small: Method | None = _SMALL,
    patch_bytes: int | None = None,
    predict_cost: float | None = None,
    draws: int = 20,
    budget: int = 40_000,
    examples: int = 1200,
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
    sites         "auto": the norm layers, with a spread that falls with the depth, and the first convolution and linear layers
                  in the order of execution, as many as stay within 200 kB. Where there are fewer than twelve norms, the
                  held-out data choose between these, the first layers alone, as many as stay within `patch_bytes`, and, if
                  those are not all, all of them, the large ones with `small`. Else as in `patch_`.
    small         the method of layers that are too large for the other one, where `sites` is "auto": `RankOne()` adds a few
                  numbers for each input and output of a layer; or LowRank(...). None leaves such layers out. The report
                  says which layer got it, and why.
    patch_bytes   what the patch may take where `sites` is "auto": a tenth of the network or 200 kB, whichever is more, if not
                  given. `Spread` counts with the size of its layer.
    predict_cost  at most so many passes of the unpatched network for all `draws` draws: the sites are then the last layers,
                  since everything before the first of them is computed once for all draws.
    draws, budget, examples, likelihood, seed, select, output, views, tolerance, progress   as in `calibrate_`; the likelihood
                  is Categorical() if not given.
    keep_tries    a file that holds what was tried: the same call, after it was killed, goes on from there, to the same result.

    Where draws are not clearly better than the temperature alone, the network is left without patches, as `calibrate_` leaves
    one that had none: `predict` then takes one pass, and the file holds the temperature. (Components that do not average to the
    given network, as those of ECMP, stay, all at their mean.) Only `predict` knows the temperatures: the network's own output,
    called as ever, is what it was.

    Modes, frozen flags and everything outside the sites come back as they were; after an error or an interruption before
    anything was learned the whole network does. Save the result with `patchbayes.save`.
    """
    if not isinstance(model, nn.Module):
        raise PatchbayesError(f"bayesianize_: expected a torch.nn.Module, got a {type(model).__name__}.")
    if is_patched(model):
        done = "is patched" if patched_sites(model) else "has a temperature of an earlier calibration"
        raise PatchbayesError(
            f"bayesianize_: the network {done} already.\n  do       calibrate_(model, held_out), or unpatch_(model) first."
        )
    broken = next((name for name, value in model.named_parameters() if not bool(value.detach().isfinite().all())), None)
    if broken is not None:
        raise PatchbayesError(
            f'bayesianize_: the parameter "{broken}" holds NaN or infinity.\n  do       load the weights of a trained network.'
        )
    check_numbers("bayesianize_", draws, budget, examples, tolerance)
    if patch_bytes is not None and (
        isinstance(patch_bytes, bool) or not isinstance(patch_bytes, int) or patch_bytes < 1
    ):
        raise PatchbayesError(f"bayesianize_(patch_bytes={patch_bytes!r}): expected a whole number of at least 1.")
    if (patch_bytes is not None or small is not _SMALL) and (sites != "auto" or isinstance(method, Mapping)):
        raise PatchbayesError('bayesianize_: small and patch_bytes go with sites="auto" and one method for all layers.')
    if predict_cost is not None and sites != "auto":
        raise PatchbayesError("bayesianize_: predict_cost chooses the sites; give one of the two.")
    generator = torch.Generator().manual_seed(seed)
    examples = affordable_examples(examples, budget, views, draws)
    chosen = HeldOut.read(held_out, examples, BATCH, generator, select or select_for(model))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    example = to_device(chosen.first(2).batches[0][0], device)  # more would be passes that nobody counts
    model_bytes = _bytes(model.parameters()) + _bytes(model.buffers())
    method = method if method is not None else Spread()
    layers: dict[str, Layers] = {}
    if sites == "auto" and not isinstance(method, Mapping):
        limit = patch_bytes or max(SHARE * model_bytes, BYTES)
        layers = candidate_layers(model, example, limit, method, small, predict_cost, draws)
    left_out = layers_left_out(model) if layers else ()
    given: Given = {}

    def patched(title: str) -> tuple[PatchReport, Calibration]:
        report = patch_(
            model,
            layers[title].rules() if layers else method,
            "norm+output" if sites == "auto" else sites,
            example_input=example,
            likelihood=likelihood,
            generator=torch.Generator().manual_seed(start),
        )
        network = network_of(model)
        given.clear()
        given.update({site.name: _given(site) for site in network.sites})
        if title in (NORMS, BOTH):
            start_norms_(network)
        if layers:
            report = dataclasses.replace(report, notes=(*report.notes, *layers[title].notes, *left_out))
        return report, Calibration(
            model, network, chosen, network.likelihood, draws, budget, output or as_tensor, tell, views, title, tries
        )

    options = (str(method), {title: str(one.methods) for title, one in layers.items()}, str(sites), draws, budget, seed)
    described = (*options, str(likelihood), None if views is None else str(views))
    tries = Tries(keep_tries, digest_of(model, chosen, *described)) if keep_tries is not None else None
    start = int(torch.randint(2**31, (), generator=generator))
    try:
        with shown(progress) as tell:
            titles, scored, earlier = list(layers) or [""], dict[str, float](), None
            for title in titles if len(titles) > 1 else ():
                _, calibration = patched(title)
                if earlier is not None:
                    calibration.follow(earlier)
                calibration.passes += _LAYER_PASSES
                scored[title], earlier = calibration.look(_LOOK / len(titles)), calibration
                _back_(model, given)
                if calibration.stopped:
                    break
            best = min(titles, key=lambda title: scored.get(title, math.inf))
            report, calibration = patched(best)
            is_given = all(_is_around(site, given[site.name]) for site in network_of(model).sites)
            if earlier is not None:
                calibration.follow(earlier)
            calibration.passes += _LAYER_PASSES
            remember_given_(model)
            tried_bytes = _bytes(patch_tensors(model).values())
            found = dataclasses.replace(calibration.run("learn", tolerance, try_start=False), trained_without=True)
            if found.chosen == "none" and is_given:
                _without_sites_(model, given)
    except BaseException:
        if is_patched(model):
            _back_(model, given)
        raise
    return BayesianizeReport(
        patch=report,
        calibration=found,
        patch_bytes=_bytes(patch_tensors(model).values()) if patched_sites(model) else 0,
        tried_bytes=tried_bytes,
        model_bytes=model_bytes,
        call='patchbayes.save(model, "patch.safetensors"); elsewhere patchbayes.load_(network, "patch.safetensors")',
    )


def _given(site: Site) -> dict[str, Tensor]:
    """A copy of the values that a fresh site was made from: what the layer has kept, or else the first component."""
    first = site.posterior.component(0)
    kept = {name: site.module._parameters.get(name) for name in first}
    return {name: (first[name] if own is None else own).detach().clone() for name, own in kept.items()}


@torch.no_grad()
def _is_around(site: Site, given: Mapping[str, Tensor]) -> bool:
    """Whether the mean of a site is the layer that was patched, up to rounding."""
    close = 16 * torch.finfo(torch.float32).eps
    return all(
        torch.allclose(mean, given[name], rtol=close, atol=close * float(given[name].abs().amax()))
        for name, mean in site.posterior.mean().items()
    )


@torch.no_grad()
def _back_(model: nn.Module, given: Given) -> None:
    """Take the patches off: the network is the one that was given, to the last bit."""
    unpatch_(model, keep=0)
    for layer, values in given.items():
        for name, value in values.items():
            getattr(model.get_submodule(layer), name).copy_(value)


def _without_sites_(model: nn.Module, given: Given) -> None:
    """Leave the network that was given, with its temperatures: draws that do not differ would cost a pass each."""
    network = network_of(model)
    _back_(model, given)
    with with_record(model) as (_, record):
        record.likelihood, record.calibration = network.likelihood, network.calibration


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
