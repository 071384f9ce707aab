"""train: from a configuration to a run folder, resumable at any point to the same bits."""

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ..data import Dataset
from ..digests import digests_alone
from ..errors import PatchbayesError
from ..files import replacing
from ..likelihoods import Gaussian
from ..objective import maximize_prior_, share_gradients_
from ..patching.checkpoint import save
from ..patching.network import network_of
from ..patching.patch import is_patched
from .accelerator import accelerated
from .beginning import begin
from .components_apart import ComponentsApart
from .config import TrainingConfig
from .coordinate_descent import Turns, turn_length, turn_of
from .data_order import Batch, EpochBatches, num_steps
from .data_record import training_data
from .disjoint_patches import Phase
from .folder import RunFolder, refuse_used
from .held_out import held_out_scores
from .interruption import Interruption, TrainingInterrupted
from .journal import Journal
from .loss import TrainingLoss, build_likelihood, build_optimizer
from .lost_ranks import noticing_lost_ranks
from .network import num_members, patched_net, spreading_sites
from .schedule import grow_spread_, learning_rate_factor
from .state import Progress, load_state_, read_state, save_state
from .writing import locked, writing

if TYPE_CHECKING:
    from accelerate import Accelerator


def train(
    config: TrainingConfig,
    folder: str | Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    trust_code: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> RunFolder:
    """Train a network as the configuration says, in a folder of its own.

    resume   go on with the run in the folder, from its last checkpoint, or from the start where there is none yet. However
             and wherever it was stopped, it ends with the same bits as a run that was not, on the same machine. The
             configuration must be that of the run (but for `config.FREE`).
    quiet    no bar on the terminal. Where the output is piped there is none anyway.
    trust_code   whether functions that the configuration names as data or model (package.module:function) may be run.
    say      is told what the columns of a table were taken for.

    SIGTERM and Ctrl-C let the step finish, write a checkpoint and raise `TrainingInterrupted`. Bits are kept on CPUs; on
    GPUs as far as the kernels are deterministic. With several processes (`accelerate launch`, `torchrun`) all call this; if
    one of them is lost, another saves the state and raises `RankLost`.
    """
    folder = Path(folder)
    with accelerated(config) as accelerator:
        _train(config, folder, accelerator, resume, quiet, trust_code, say)
    return RunFolder.open(folder, trust_code=trust_code)


def _train(
    config: TrainingConfig,
    folder: Path,
    accelerator: "Accelerator",
    resume: bool,
    quiet: bool,
    trust_code: bool,
    say: Callable[[str], None],
) -> None:
    first = accelerator.is_main_process
    with contextlib.ExitStack() as stack:
        if first:
            if not resume and folder.is_dir():
                refuse_used(folder)
            stack.enter_context(locked(folder))
        if config.threads is None and resume and (folder / "config.json").exists():
            # Their number changes the last bits: as many as when the run began.
            began = RunFolder.open(folder).config.get("machine", {})
            torch.set_num_threads(began.get("threads", torch.get_num_threads()))
        dataset = training_data(config, trust_code)
        if first and dataset.columns:
            say("\n".join(["columns:", *(f"  {column}" for column in dataset.columns)]))
        trainer = _Trainer(config, dataset, accelerator, trust_code)  # fails, if it does, before anything is written
        total = config.epochs * trainer.steps
        journal = Journal(folder, total=total, quiet=quiet, tensorboard=config.tensorboard, silent=not first)
        if first:
            begin(folder, config, dataset, resume)
        accelerator.wait_for_everyone()
        interruption = stack.enter_context(Interruption())
        with noticing_lost_ranks(config.timeout, folder, trainer.rescue, trainer.where):
            trainer.run(RunFolder.open(folder), stack.enter_context(journal), interruption, stack)


class _Trainer:
    """The loop, with all it works on."""

    def __init__(self, config: TrainingConfig, dataset: Dataset, accelerator: "Accelerator", trust_code: bool) -> None:
        self.config, self.dataset, self.accelerator = config, dataset, accelerator
        self.steps = num_steps(len(dataset.train), config.batch_size)
        self.network, self.report = patched_net(config, dataset.num_outputs, dataset.input_shape, trust_code=trust_code)
        self.members = num_members(self.network)
        self.spreading = spreading_sites(self.network) if config.jitter_warmup else []
        self._check_batches()
        likelihood = build_likelihood(dataset.task, config)
        if is_patched(self.network):
            network_of(self.network).likelihood = likelihood
            network_of(self.network).same_draws = config.same_draws
        self.loss = TrainingLoss(self.network, likelihood, config, len(dataset.train))
        self.bare_optimizer = build_optimizer(config, self.network, likelihood)
        self.wrapped, self.optimizer = accelerator.prepare(self.loss.train(), self.bare_optimizer)
        self.turns = Turns(config, self.loss, self.bare_optimizer, dataset)
        self.apart = None
        if config.component_workers:
            self.apart = ComponentsApart(config, self.loss, self.bare_optimizer, dataset, trust_code=trust_code)
        self.progress = Progress()
        self.saved = time.monotonic()
        self._before_step: dict[str, Tensor] = {}

    def run(
        self, folder: RunFolder, journal: Journal, interruption: Interruption, ending: contextlib.ExitStack
    ) -> None:
        """Train from where the folder stands to the end; `ending` ends worker processes."""
        self.folder, self.journal, self.interruption, self.ending = folder, journal, interruption, ending
        self._resume()
        while self.progress.epoch < self.config.epochs:
            self._epoch()
        self.journal.log("done")

    def _resume(self) -> None:
        state = self.folder.path / "last.safetensors"
        if not state.exists() and self.folder.history():
            raise PatchbayesError(
                f"{self.folder.path} cannot be resumed: last.safetensors is missing, although metrics.jsonl lists epochs.\n"
                "  do       put last.safetensors back, or train in another folder."
            )
        if state.exists():
            self.progress = load_state_(state, self.loss, self.bare_optimizer)
        progress = self.progress
        if self.accelerator.is_main_process:
            self.folder.rewrite_history(progress.rows)
            if progress.rows and progress.step == 0 and progress.rows[-1]["epoch"] == progress.epoch:
                self._save_best()  # may have been stopped between writing the state and this
        where = f"resumed after epoch {progress.epoch}, step {progress.step}" if state.exists() else "started"
        self.journal.log(f"{where}; {self.accelerator.num_processes} process(es) on {self.accelerator.device}")
        if not state.exists():
            for column in self.dataset.columns:
                self.journal.log(f"column {column}")
            if self.report is not None:
                self.journal.log(str(self.report))
        self.journal.begin(self._global_step)

    def _epoch(self) -> None:
        progress, config = self.progress, self.config
        if self.loss.prior is not None and progress.step == 0:
            maximize_prior_(self.network)
        batches = EpochBatches(
            self.dataset,
            config.batch_size,
            config.seed,
            progress.epoch,
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )
        while progress.step < self.steps:
            stop = self._take_turn()
            if self.apart is not None and self.turns.turn == "patched":
                self._phase(self.apart, stop)
                continue
            for batch in batches.starting_at(progress.step, config.workers, stop):
                with self.turns.serving(lambda: batches.numbers(progress.step)):
                    asked = self._step(batch)
                self.journal.advance(self._global_step)
                if asked:
                    self._stop()
                if self._checkpoint_is_due():
                    self._save()
        last = progress.epoch + 1 == config.epochs
        if last or (progress.epoch + 1) % config.report_epochs == 0:
            self._report()
        else:
            progress.epoch, progress.step = progress.epoch + 1, 0

    def _take_turn(self) -> int:
        """Begin the turn of this step, if it is another one; where its steps in this epoch end."""
        config = self.config
        turn = turn_of(config, self._global_step, self.steps)
        if turn is None:
            return self.steps
        length = turn_length(config, self.steps)
        if turn != self.turns.turn:
            self.turns.begin(turn, keep=self.apart is None, epochs=length / self.steps)
            kept = ""
            if turn == "patched" and self.apart is None:
                kept = f"; prefix not kept: {self.turns.why_not}" if self.turns.why_not else "; prefix kept"
            self.journal.log(f"turn of the {turn} parameters{kept}")
            if self.accelerator.num_processes > 1:  # DDP exchanges the gradients of those that learn when it is made
                self.wrapped = None
                self.accelerator.free_memory()
                self.wrapped = self.accelerator.prepare_model(self.loss)
        return min(self.steps, (self._global_step // length + 1) * length - self.progress.epoch * self.steps)

    def _phase(self, apart: ComponentsApart, stop: int) -> None:
        """Steps in which components learn apart, to step `stop` of the epoch."""
        progress, began, steps = self.progress, time.perf_counter(), stop - self.progress.step
        phase = Phase(self._global_step, self._global_step + steps)
        learned = apart.train_(phase, self.ending, lambda: self.interruption.requested, self.journal.log)
        if learned is None:
            self._stop()
        assert learned is not None
        nll = sum(one.nll for one in learned)
        with torch.no_grad():  # at the end of the phase: within it, components differ in how far they have come
            kl = steps * float(self.loss.kl()) if self.loss.with_kl else 0.0
        self._check_finite(nll, kl)
        progress.nll, progress.kl = progress.nll + nll, progress.kl + kl
        progress.steps, progress.step = progress.steps + steps, progress.step + steps
        progress.seconds += time.perf_counter() - began
        self.journal.advance(self._global_step)
        if self._agreed(torch.zeros(1, device=self.accelerator.device))[1]:
            self._stop()
        if self._checkpoint_is_due():
            self._save()

    def _step(self, batch: Batch) -> bool:
        """One step of the optimizer; whether some process was asked to stop."""
        began = time.perf_counter()
        config, progress = self.config, self.progress
        inputs, targets, share = batch
        device = self.accelerator.device
        factor = learning_rate_factor(config, self._global_step, self.steps)
        for group in self.bare_optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]
        if config.jitter_warmup:
            grow_spread_(self.spreading, config.jitter_warmup, self._global_step, self.steps)
        self._remember()
        self.optimizer.zero_grad()
        loss, nll, kl = self.wrapped(inputs.to(device), targets.to(device), share)
        self.accelerator.backward(loss)
        if self.members:
            self._scale_to_members()
        if config.sharing:
            share_gradients_(self.network, config.sharing)
        values, stop = self._agreed(torch.stack([share * nll, kl.to(nll)]))
        self._check_finite(*values)
        self.optimizer.step()  # after all that needs the other processes: a step is whole or was not made
        self._before_step = {}
        progress.nll, progress.kl = progress.nll + values[0], progress.kl + values[1]
        progress.steps, progress.step = progress.steps + 1, progress.step + 1
        progress.seconds += time.perf_counter() - began
        return stop

    def _check_finite(self, nll: float, kl: float) -> None:
        if not (math.isfinite(nll) and math.isfinite(kl)):
            raise PatchbayesError(
                f"the loss is not finite {self.where()} (NLL {nll}, KL {kl}).\n"
                "  do       train in another folder with a smaller lr, or a warm-up, or look at the data."
            )

    def where(self) -> str:
        return f"in epoch {self.progress.epoch + 1}, step {self.progress.step + 1}"

    def _remember(self) -> None:
        """What a forward pass changes, to undo a step that another process's end leaves half done."""
        if self.accelerator.num_processes > 1:
            parameters = {name for name, _ in self.loss.named_parameters()}
            state = self.loss.state_dict()
            self._before_step = {name: value.clone() for name, value in state.items() if name not in parameters}

    def rescue(self) -> bool:
        """Save the state after the last whole step, unless the folder has it; whether it was saved."""
        path = self.folder.path / "last.safetensors"
        if path.exists():
            saved = read_state(path)[1]["progress"]
            if (saved["epoch"], saved["step"]) >= (self.progress.epoch, self.progress.step):
                return False
        self.loss.load_state_dict(self.loss.state_dict() | self._before_step)
        save_state(path, self.loss, self.bare_optimizer, self.progress)
        return True

    def _scale_to_members(self) -> None:
        """The loss is a mean over the members of an ensemble: times their number, each learns as a network alone."""
        for group in self.bare_optimizer.param_groups:
            if group["name"].startswith("patched"):
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self.members)

    def _agreed(self, values: Tensor) -> tuple[list[float], bool]:
        """The mean of values over all processes, and whether one of them was asked to stop."""
        if self.accelerator.num_processes == 1:
            return values.tolist(), self.interruption.requested
        asked = values.new_tensor([float(self.interruption.requested)])
        *means, stop = self.accelerator.reduce(torch.cat([values, asked]), "mean").tolist()
        return means, stop > 0

    def _report(self) -> None:
        """A row of metrics for the epochs since the last one, and a checkpoint."""
        scores: dict[str, float] | None = {}
        if self.dataset.held_out is not None:
            size = max(1, self.config.batch_size // self.accelerator.num_processes)
            scores = held_out_scores(
                self.network,
                self.dataset,
                self.dataset.held_out,
                self.loss.likelihood,
                self.config.eval_draws,
                size,
                lambda: self.interruption.requested,
            )
        _, stop = self._agreed(torch.zeros(1, device=self.accelerator.device))
        if stop or scores is None:
            self._stop()  # the look at the held-out part is taken again after resuming
        assert scores is not None
        progress = self.progress
        row = self._row(scores)
        progress.epoch, progress.step = progress.epoch + 1, 0
        progress.rows.append(row)
        progress.forget_sums()
        if self.accelerator.is_main_process:
            self.folder.append(row)
            self.journal.row(row)
            self._save()
            self._save_best()

    def _row(self, scores: dict[str, float]) -> dict[str, Any]:
        progress, config = self.progress, self.config
        nll = progress.nll / progress.steps
        kl = progress.kl / progress.steps if config.objective == "elbo" else None
        row: dict[str, Any] = {
            "epoch": progress.epoch + 1,
            "step": self._global_step,
            "loss": nll + (kl or 0.0) / len(self.dataset.train),
            "nll": nll,
            "kl": kl,
            "lr": learning_rate_factor(config, self._global_step - 1, self.steps) * config.chosen_lr,
            "train_seconds": progress.seconds,
            **scores,
        }
        if config.learn_precision:
            assert isinstance(self.loss.likelihood, Gaussian)
            row["output_precision"] = float(self.loss.likelihood.precision.detach())
        score = "held_out_rmse" if "held_out_rmse" in row else "held_out_nll"
        row["best"] = score not in row or all(row[score] < before[score] for before in progress.rows)
        return row

    @property
    def _global_step(self) -> int:
        return self.progress.epoch * self.steps + self.progress.step

    def _checkpoint_is_due(self) -> bool:
        seconds, steps = self.config.checkpoint_seconds, self.config.checkpoint_steps
        due = seconds is not None and time.monotonic() - self.saved >= seconds
        return due or (steps is not None and self._global_step % steps == 0)

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            save_state(self.folder.path / "last.safetensors", self.loss, self.bare_optimizer, self.progress)
        self.saved = time.monotonic()

    def _save_best(self) -> None:
        """Write best.safetensors if the last row of metrics was the best; what was calibrated since is left alone."""
        if not self.progress.rows[-1]["best"] or self.folder.is_calibrated:
            return
        path = self.folder.path / "best.safetensors"
        with writing(path):
            if is_patched(self.network):
                save(self.network, path, whole=True)
                return
            state = {key: value.to("cpu", copy=True).contiguous() for key, value in self.network.state_dict().items()}
            with replacing(path) as temporary:
                safetensors.torch.save_file(state, temporary, metadata=digests_alone(state))

    def _stop(self) -> None:
        self._save()
        progress = self.progress
        where = f"epoch {progress.epoch + 1} of {self.config.epochs}, step {progress.step} of {self.steps}"
        self.journal.log(f"interrupted in {where}")
        raise TrainingInterrupted(
            f"training was interrupted in {where}; everything is saved.\n"
            f"  do       go on with resume=True (--resume) in {self.folder.path}.",
            self.interruption.signal_number,
        )

    def _check_batches(self) -> None:
        smallest = len(self.dataset.train) // self.steps // self.accelerator.num_processes
        needs_two = any(isinstance(module, nn.BatchNorm1d) for module in self.network.modules())
        if smallest < (2 if needs_two else 1):
            raise PatchbayesError(
                f"TrainingConfig(batch_size={self.config.batch_size}): {len(self.dataset.train)} examples in {self.steps} "
                f"steps on {self.accelerator.num_processes} process(es) leave {smallest} for a batch, expected at least "
                f"{2 if needs_two else 1}{' (batch norm)' if needs_two else ''}.\n  do       a larger batch_size."
            )
