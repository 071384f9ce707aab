"""A Lightning callback: patches before the optimizer is made, the KL once for every step, and averaged validation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from ..errors import PatchbayesError
from ..likelihoods import Likelihood
from ..objective import kl
from ..patching.checkpoint import save
from ..patching.network import network_of
from ..patching.patch import is_patched, patch_
from ..patching.selection import Sites
from ..posteriors.method import Method
from ..prediction import Predictor


class PatchBayes(Callback):
    """Train a Lightning module as a patched network: `Trainer(callbacks=[PatchBayes(pb.ECMP(5))])`.

    When fitting, validating, testing or predicting begins, the network is patched, unless it is already. In every step of the
    optimizer, however many batches it accumulates, the gradient of KL / num_data is added, and the KL is logged as "kl". In
    validation and in tests the module calls a `Predictor` in place of its network: the logarithms of averaged probabilities,
    so that `cross_entropy` and accuracy there are those of the averaged prediction. Otherwise the module's own steps stay.

    method, sites, likelihood   as in `patch_`.
    network   the name of the module's child that is patched; by default its only child with parameters. "" is the module
              itself, for modules whose layers are their own and whose steps call `self(x)`; it cannot stand aside for a
              predictor, so `draws` is then None.
    draws     how many draws validation and tests average; None leaves them to the mean network.
    num_data  the number of training examples; by default the length of the training data set.
    file      where the patch is written whenever Lightning writes a checkpoint and when fitting ends: what patching added,
              where nothing else is trained, otherwise the whole network. Read it with `load_`.

    Checkpoints of Lightning hold the patched network: resume with this callback, and before `load_from_checkpoint`'s
    `load_state_dict` patch the module (`callback.patch_(module)`). With `ddp_spawn` do so before `fit`: the processes that it
    starts send parameters back, and the module here must have them. Sharded strategies (FSDP) are not supported.
    """

    def __init__(
        self,
        method: Method | Mapping[Sites, Method],
        sites: Sites = "norm+output",
        *,
        likelihood: Likelihood | None = None,
        network: str | None = None,
        draws: int | None = 20,
        num_data: int | None = None,
        file: str | Path | None = None,
    ) -> None:
        if num_data is not None and (isinstance(num_data, bool) or not isinstance(num_data, int) or num_data < 1):
            raise PatchbayesError(f"PatchBayes(num_data={num_data!r}): expected a number of examples of at least 1.")
        if network == "" and draws is not None:
            raise PatchbayesError(
                f'PatchBayes(network="", draws={draws}): a module cannot stand aside for a predictor of itself.\n'
                "  do       draws=None, and pb.predict(self, x) in the module's own validation_step."
            )
        self.method, self.sites, self.likelihood = method, sites, likelihood
        self.network, self.draws, self.num_data = network, draws, num_data
        self.file = None if file is None else Path(file)
        self._num_data = num_data

    def patch_(self, module: nn.Module) -> None:
        """Patch the network of a module, unless it is patched."""
        network = self._network(module)
        if not is_patched(network):
            patch_(network, self.method, self.sites, likelihood=self.likelihood)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        start = getattr(trainer.strategy.launcher, "_start_method", None)
        if stage == "fit" and start is not None and not is_patched(pl_module):
            raise PatchbayesError(
                f"PatchBayes: this strategy starts processes ({start}) and takes their parameters back, so the module must be "
                "patched before.\n  do       callback.patch_(module), then trainer.fit(module)."
            )
        self.patch_(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._num_data = self.num_data
        if self._num_data is None:
            dataset = getattr(trainer.train_dataloader, "dataset", None)
            if dataset is None or not hasattr(dataset, "__len__"):
                raise PatchbayesError(
                    "PatchBayes: the training data have no length.\n  do       PatchBayes(..., num_data=number of examples)."
                )
            self._num_data = len(dataset)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Add the gradient of KL / num_data to what the batches of this step have left; unscaled, under mixed precision."""
        assert self._num_data is not None
        network = self._network(pl_module)
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        learned = [p for p in network.parameters() if p.requires_grad and id(p) in mine]
        divergence = kl(network)
        if learned and divergence.requires_grad:
            gradients = torch.autograd.grad(divergence / self._num_data, learned, allow_unused=True)
            estimated = any(site.posterior.kl_draws for site in network_of(network).sites)
            for parameter, gradient in zip(learned, gradients, strict=True):
                if gradient is None:
                    continue
                if estimated and trainer.world_size > 1:  # every process has another draw
                    gradient = trainer.strategy.reduce(gradient, reduce_op="mean")
                parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
        pl_module.log("kl", divergence.detach())

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stand_aside(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._come_back(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stand_aside(pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._come_back(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._come_back(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._write(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module)

    def _name(self, module: nn.Module) -> str:
        if self.network is not None:
            return self.network
        children = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
        if len(children) != 1:
            raise PatchbayesError(
                f"PatchBayes: {type(module).__name__} has {len(children)} children with parameters "
                f"({', '.join(children[:5])}); expected one.\n"
                '  do       PatchBayes(..., network="the child\'s name"), or network="" for the module itself.'
            )
        return children[0]

    def _network(self, module: nn.Module) -> nn.Module:
        found = module.get_submodule(self._name(module))
        return found.model if isinstance(found, Predictor) else found

    def _stand_aside(self, module: nn.Module) -> None:
        """Let a predictor stand where the network was, until `_come_back`."""
        if self.draws is not None:
            parent, _, own = self._name(module).rpartition(".")
            module.get_submodule(parent)._modules[own] = Predictor(self._network(module), self.draws, engine="auto")

    def _come_back(self, module: nn.Module) -> None:
        parent, _, own = self._name(module).rpartition(".")
        holder = module.get_submodule(parent)
        if own and isinstance(holder._modules.get(own), Predictor):
            holder._modules[own] = self._network(module)

    def _write(self, trainer: Trainer, module: nn.Module) -> None:
        if self.file is None or not trainer.is_global_zero:
            return
        network = self._network(module)
        patched = {id(p) for site in network_of(network).sites for p in site.parameters().values()}
        trained = any(p.requires_grad and id(p) not in patched for p in network.parameters())
        self.file.parent.mkdir(parents=True, exist_ok=True)
        save(network, self.file, whole=trained)
