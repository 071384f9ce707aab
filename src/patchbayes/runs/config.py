"""TrainingConfig: everything that decides a training run, as one checked value that goes into a JSON file."""

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..data import Augmentation, Task, parse_columns
from ..errors import PatchbayesError
from ..posteriors import Method
from ..posteriors.text import FLAT_OPTIONS, VANILLA, parse_rules, text_of, text_of_rules, upgraded

#: What may differ when a run is resumed: it does not change the result.
FREE = ("data_dir", "workers", "checkpoint_seconds", "checkpoint_steps", "tensorboard", "timeout")
#: More would exhaust the system: each is a thread of the processor.
MOST_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """A training run. Only `data` and `model` have no default; None means that method, optimizer or data decide.

    Data
    data, data_dir, target, size, split, task   which data set, as `data.read` takes it.
    columns        what some columns of a CSV file hold, each as a text such as "age:number"; the others are inferred.
    held_out       share of the training part that is kept for choosing the best checkpoint; 0 for none.
    data_seed      which examples those are.
    augmentation   of training images: "none", "crop", "crop+flip", "resized-crop+flip"; None: the data set's own.

    Network
    model          as `nets.named.build_net` takes it.
    method         as text: "ecmp(5, jitter=0.3)", "dropout(0.1)", "vanilla" (not patched); or rules for several kinds of
                   layers, "norm: emp(5); linear: dropout(0.1)".
    sites          where a single method is put, as in `patch_`; None: where the paper puts it (norm+output for emp and
                   ecmp, norm for dropout, linear+conv for dropconnect, all for meanfield and ensemble).
    jitter_warmup  epochs over which the spread that the method starts with grows, instead of being there from the start.

    Objective
    objective      "elbo": mean NLL + KL / N (appendix B.2; for vanilla the weight prior alone, tau / 2 ||w||^2 / N);
                   "simplified": mean NLL with the same weight decay on all components (appendix C.1).
    prior          "elbo": "gaussian" with fixed tau and rho; "laplace", the L1 penalty, for methods without noise; "learned":
                   tau and rho of every layer, set to their best before every epoch; "gamma": a Gamma law on each instead.
    prior_precision   tau and rho, 1 if not given ("elbo"): fixed, at the start, or as the mean of the Gamma law's own prior.
    weight_decay   "simplified": the optimizer's weight decay, 0.002 / batch_size if not given (twice the paper's lambda).
                   "elbo": where given, it takes the place of the KL on shared parameters; the KL is then that of the
                   patched ones alone, so that nothing is decayed twice.
    lambdas        "simplified": the four lambdas one by one instead (appendix C.1), of patched weights, patched biases,
                   shared weights and shared biases.
    output_precision, learn_precision   regression: precision of the noise on standardized targets, 1 if not given, and
                   whether it is learned.
    draws_per_step draws S of the network in each step. An ensemble trains all its members in each.
    same_draws     on several processes: all compute with one draw in a step, instead of each with its own.

    Optimizer
    optimizer      "sgd", "adam" or "adamw".
    lr             0.1 for sgd, 0.001 for the others, if not given.
    patch_lr       of what the patches brought, such as components; lr if not given.
    sharing        how much of a step's gradient the components take that were not drawn in it, which would else learn in
                   one of K steps (`share_gradients_`). 0: off, as the paper trains; 1: all components move alike. Weight
                   decay of patched layers is then part of the loss, so that below 1 training comes to rest where it would
                   without sharing.
    learn          "all", or "patches" alone: the shared parameters rest for the whole run.
    alternate      epochs of a turn, where shared and patched parameters learn in turns (appendix C.2); 0: together. What rests
                   is not differentiated either. While shared parameters rest, so do batch norms that are not patched (they
                   normalize by their running statistics), and in turns of two epochs or more, without augmentation, what
                   lies before the first patched layer is computed once.
    component_workers   0: the patches learn in the training process from random draws. From 1 on, while shared parameters
                   rest: EMP's components learn apart, each on draws of its own, in as many worker processes (1: in the
                   training process, or in each of several ranks its share). How many does not change the result.
    momentum, nesterov   for sgd; 0.9 if not given.
    schedule       of the learning rates: "cosine" (to 0), "constant" or "step" (times `step_factor`, 0.1 if not given, at
                   each of `milestones`, shares of the run, 0.5 and 0.75 if not given).
    warmup         epochs in which the learning rates first rise from 0.
    epochs, batch_size   batches of nearly equal size, at most `batch_size` examples, over all processes together.

    Running
    seed           of the start, the draws, the data order and the augmentation.
    precision      "float32", or "bfloat16" for mixed precision.
    device         "auto" takes a GPU where there is one; "cpu" does not.
    threads        of the processor; None: as they are.
    workers        processes that read and prepare batches; 0: the training process does.
    report_epochs  epochs between two rows of metrics, each with a look at the held-out part and a checkpoint.
    eval_draws     draws for that look.
    checkpoint_seconds, checkpoint_steps   when else a checkpoint is written.
    timeout        seconds after which a process is given up that others wait for, or a worker that makes no step.
    tensorboard    write TensorBoard files too.
    """

    data: str
    model: str
    data_dir: str | None = None
    target: str | int | None = None
    size: int | None = None
    split: int = 0
    task: Task | None = None
    held_out: float = 0.1
    columns: tuple[str, ...] = ()
    data_seed: int = 0
    augmentation: Augmentation | None = None

    method: str = "ecmp"
    sites: str | None = None
    jitter_warmup: float = 0.0

    objective: Literal["elbo", "simplified"] = "elbo"
    prior: Literal["gaussian", "laplace", "learned", "gamma"] = "gaussian"
    prior_precision: float | None = None
    weight_decay: float | None = None
    lambdas: tuple[float, ...] | None = None
    output_precision: float | None = None
    learn_precision: bool = False
    draws_per_step: int = 1
    same_draws: bool = False

    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    lr: float | None = None
    patch_lr: float | None = None
    sharing: float = 0.0
    learn: Literal["all", "patches"] = "all"
    alternate: float = 0.0
    component_workers: int = 0
    momentum: float | None = None
    nesterov: bool = False
    schedule: Literal["cosine", "constant", "step"] = "cosine"
    milestones: tuple[float, ...] | None = None
    step_factor: float | None = None
    warmup: float = 0.0
    epochs: int = 10
    batch_size: int = 128

    seed: int = 0
    precision: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu"] = "auto"
    threads: int | None = None
    workers: int = 0
    report_epochs: int = 1
    eval_draws: int = 5
    checkpoint_seconds: float | None = 300.0
    checkpoint_steps: int | None = None
    timeout: float = 600.0
    tensorboard: bool = False

    def __post_init__(self) -> None:
        _check_types(self)
        _check_ranges(self)
        object.__setattr__(self, "method", self._method_as_text())
        _check_together(self)

    def _method_as_text(self) -> str:
        """One spelling for one method, so that configurations can be compared."""
        rules = self.rules()
        if not rules:
            return VANILLA
        return text_of_rules(rules) if ":" in self.method else text_of(next(iter(rules.values())))

    def rules(self) -> dict[str, Method]:
        """Sites and methods, as `patch_` takes them; empty for vanilla."""
        if self.method.strip().lower() == VANILLA:
            return {}
        rules = parse_rules(self.method, self.sites)
        if self.sites is not None and ":" in self.method:
            _refuse("sites", self.sites, f"the rules of method {self.method!r} say it already")
        return rules

    @property
    def reading(self) -> dict[str, Any]:
        """The keywords of `data.read`, but for the folder."""
        names = ("held_out", "target", "size", "split", "task")
        columns = {"columns": parse_columns(self.columns)} if self.columns else {}
        return {"seed": self.data_seed, **{name: getattr(self, name) for name in names}, **columns}

    @property
    def chosen_sites(self) -> str:
        """Where the method is put; several kinds of layers are joined by commas."""
        return ", ".join(self.rules())

    @property
    def chosen_lr(self) -> float:
        """The learning rate of shared parameters, before the schedule."""
        return self.lr if self.lr is not None else (0.1 if self.optimizer == "sgd" else 1e-3)

    @property
    def chosen_weight_decay(self) -> float:
        """The weight decay: of all components with "simplified", else of shared parameters."""
        default = 0.002 / self.batch_size if self.objective == "simplified" else 0.0
        return default if self.weight_decay is None else self.weight_decay

    def to_json(self) -> dict[str, Any]:
        """The config as plain JSON values."""
        fields = dataclasses.asdict(self)
        listed = {
            "milestones": None if self.milestones is None else list(self.milestones),
            "lambdas": None if self.lambdas is None else list(self.lambdas),
            "columns": list(self.columns),
        }
        return fields | listed

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "TrainingConfig":
        """The config that `to_json` described, in this version or in 0.1.0.

        Unknown keys are refused; what is missing has its default.
        """
        content = _from_0_1_0(content)
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [key for key in content if key not in known]
        if unknown:
            raise PatchbayesError(
                f"TrainingConfig: unknown {', '.join(map(repr, unknown))}.\n  known    {', '.join(known)}"
            )
        missing = [key for key in ("data", "model") if key not in content]
        if missing:
            raise PatchbayesError(f"TrainingConfig: {' and '.join(missing)} must be given.")
        values = dict(content)
        for name in ("milestones", "columns", "lambdas"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return cls(**values)

    def differences(self, other: "TrainingConfig") -> dict[str, tuple[Any, Any]]:
        """The keys in which `other` would give another result, with both values."""
        mine, theirs = self.to_json(), other.to_json()
        differing = {key: (mine[key], theirs[key]) for key in mine if key not in FREE and mine[key] != theirs[key]}
        if self.component_workers and other.component_workers:  # any number of them gives the same
            differing.pop("component_workers", None)
        return differing


def _from_0_1_0(content: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings with the method as one text: 0.1.0 had its options beside it, and other defaults."""
    values = dict(content)
    options = {name: values.pop(name) for name in FLAT_OPTIONS if name in values}
    name = values.get("method", "ecmp")
    if not isinstance(name, str) or not (options or ("sharing" in values and values["sharing"] is None)):
        return values
    found = upgraded(name, options, values.get("sites"))
    values |= {"method": found.text, "sites": found.sites}
    return values | ({"sharing": found.sharing} if values.get("sharing", 0) is None else {})


class SettingError(PatchbayesError):
    """A setting that a run cannot have: its name and value, and what was expected."""

    def __init__(self, name: str, value: Any, why: str) -> None:
        super().__init__(f"TrainingConfig({name}={value!r}): {why}.")
        self.name, self.value, self.why = name, value, why


def _refuse(name: str, value: Any, why: str) -> typing.NoReturn:
    raise SettingError(name, value, why)


def _check_types(config: TrainingConfig) -> None:
    for name, hint in typing.get_type_hints(TrainingConfig).items():
        value = getattr(config, name)
        if not _fits(value, hint):
            _refuse(name, value, f"expected {_described(hint)}")


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(one, typing.get_args(hint)[0]) for one in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _described(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_described(one) for one in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(f'"{one}"' for one in typing.get_args(hint))
    words = {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "a text",
        types.NoneType: "None",
    }
    return words.get(hint, "a list of texts" if typing.get_args(hint)[:1] == (str,) else "a list of numbers")


#: name: (smallest, whether that itself is allowed, largest)
_RANGES: dict[str, tuple[float, bool, float]] = {
    "split": (0, True, 2**62),
    "size": (1, True, 2**15),
    "data_seed": (0, True, 2**62),
    "seed": (0, True, 2**62),
    "jitter_warmup": (0, True, math.inf),
    "prior_precision": (0, False, math.inf),
    "weight_decay": (0, True, math.inf),
    "output_precision": (0, False, math.inf),
    "draws_per_step": (1, True, 10**6),
    "lr": (0, False, math.inf),
    "patch_lr": (0, True, math.inf),
    "sharing": (0, True, 1),
    "alternate": (0, True, math.inf),
    "momentum": (0, True, 1),
    "step_factor": (0, False, 1),
    "warmup": (0, True, math.inf),
    "epochs": (1, True, 10**7),
    "batch_size": (1, True, 2**40),
    "threads": (1, True, MOST_THREADS),
    "workers": (0, True, 256),
    "component_workers": (0, True, 1024),
    "timeout": (0, False, 10**7),
    "report_epochs": (1, True, 10**7),
    "eval_draws": (1, True, 10**6),
    "checkpoint_seconds": (0, True, math.inf),
    "checkpoint_steps": (1, True, 2**62),
}


def _check_ranges(config: TrainingConfig) -> None:
    for name, (low, included, high) in _RANGES.items():
        value = getattr(config, name)
        if value is not None and not ((value >= low if included else value > low) and value <= high):
            upper = f" and at most {high:g}" if high < math.inf else ""
            _refuse(name, value, f"expected a number {'of at least' if included else 'above'} {low:g}{upper}")
    if not 0 <= config.held_out < 1:
        _refuse("held_out", config.held_out, "expected a share of at least 0 and below 1")
    if config.milestones is not None and not all(0 < share < 1 for share in config.milestones):
        _refuse("milestones", config.milestones, "expected shares of the run, between 0 and 1")
    if config.lambdas is not None and not (len(config.lambdas) == 4 and min(config.lambdas) >= 0):
        _refuse("lambdas", config.lambdas, "expected four numbers of at least 0")
    for name in ("data", "model", "sites", "data_dir"):
        if getattr(config, name) == "":
            _refuse(name, "", "expected a name")
    parse_columns(config.columns)


def _check_together(config: TrainingConfig) -> None:
    """No option is accepted and ignored: what the others make meaningless is refused.

    What depends on the patched network is refused when it is built.
    """
    if not config.rules():
        for name in ("sites", "patch_lr"):
            if getattr(config, name) is not None:
                _refuse(name, getattr(config, name), 'method "vanilla" patches nothing')
        patched_only = {"draws_per_step": 1, "sharing": 0, "alternate": 0, "jitter_warmup": 0, "prior": "gaussian"}
        processes = {"learn": "all", "component_workers": 0, "same_draws": False}
        for name, plain in (patched_only | {"lambdas": None} | processes).items():
            if getattr(config, name) != plain:
                _refuse(name, getattr(config, name), 'it is for patched networks, and method "vanilla" patches nothing')
        if config.weight_decay is not None and config.prior_precision is not None:
            _refuse(
                "prior_precision", config.prior_precision, 'weight_decay takes its place, and "vanilla" patches nothing'
            )
    if config.alternate >= config.epochs:
        _refuse("alternate", config.alternate, f"patched parameters would have no turn in {config.epochs} epochs")
    if config.alternate and config.learn == "patches":
        _refuse("alternate", config.alternate, 'learn="patches" gives the shared parameters no turn')
    if config.component_workers:
        if not config.alternate and config.learn == "all":
            _refuse(
                "component_workers",
                config.component_workers,
                'components learn apart while shared parameters rest: give alternate or learn="patches" too',
            )
        for name, plain in {"draws_per_step": 1, "sharing": 0, "jitter_warmup": 0, "same_draws": False}.items():
            if getattr(config, name) != plain:
                _refuse(
                    name, getattr(config, name), "components that learn apart (component_workers) have no use for it"
                )
    if config.jitter_warmup > config.epochs:
        _refuse("jitter_warmup", config.jitter_warmup, f"it ends after the run ({config.epochs} epochs)")
    if config.objective == "simplified":
        for name, plain in (("prior_precision", None), ("prior", "gaussian")):
            if getattr(config, name) != plain:
                _refuse(name, getattr(config, name), 'objective "simplified" has weight_decay or lambdas instead')
    if config.lambdas is not None:
        if config.objective != "simplified":
            _refuse(
                "lambdas", config.lambdas, 'they are for objective "simplified"; the ELBO has prior and prior_precision'
            )
        if config.weight_decay is not None:
            _refuse("lambdas", config.lambdas, "weight_decay is all four in one number; give one of the two")
    if config.optimizer != "sgd":
        for name, given in (("momentum", config.momentum is not None), ("nesterov", config.nesterov)):
            if given:
                _refuse(name, getattr(config, name), f'it is for optimizer "sgd"; this is "{config.optimizer}"')
    if config.nesterov and config.momentum == 0:
        _refuse("nesterov", True, "it needs a momentum above 0")
    if config.schedule != "step":
        for name in ("milestones", "step_factor"):
            if getattr(config, name) is not None:
                _refuse(name, getattr(config, name), f'it is for schedule "step"; this is "{config.schedule}"')
    if config.warmup > config.epochs:
        _refuse("warmup", config.warmup, f"it ends after the run ({config.epochs} epochs)")
