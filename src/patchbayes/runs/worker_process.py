"""python -m patchbayes.runs.worker_process FOLDER NUMBER: a worker of `runs.workers`, started by it and by nobody else."""

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import IO, Any

from ..errors import PatchbayesError
from ..patching.network import network_of
from .accelerator import processor_settings
from .config import TrainingConfig
from .coordinate_descent import Turns
from .data_record import training_data
from .disjoint_patches import HandTraining, Phase, RunningStatistics
from .loss import TrainingLoss, build_likelihood, build_optimizer
from .network import patched_net
from .workers import CHANGES, HEARTBEAT, STEPS, SharedTensors, take_buffers_


def main() -> None:
    """Train the hands that come by standard input, one JSON object a line, and answer each by one line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints does not disturb the answers
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    description = json.loads((folder / "description.json").read_text(encoding="utf-8"))
    given: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(sys.stdin, given), daemon=True).start()
    with processor_settings(description["threads"]):
        _work(folder, number, description, given, answers)


def _listen(lines: IO[str], given: "queue.Queue[dict[str, Any]]") -> None:
    for line in lines:
        given.put(json.loads(line))
    os._exit(1)  # the parent has gone


def _work(
    folder: Path, number: int, description: dict[str, Any], given: "queue.Queue[dict[str, Any]]", answers: IO[str]
) -> None:
    config, trusted = TrainingConfig.from_json(description["config"]), description["trust_code"]
    dataset = training_data(config, trusted)
    outputs, shape = description["num_outputs"], tuple(description["input_shape"])
    network, _ = patched_net(config, outputs, shape, trust_code=trusted)
    likelihood = build_likelihood(dataset.task, config)
    network_of(network).likelihood = likelihood
    loss = TrainingLoss(network, likelihood, config, len(dataset.train)).train()
    shared = SharedTensors(folder / "tensors", [(name, kind, shape) for name, kind, shape in description["tensors"]])
    for name, parameter in loss.named_parameters():
        if parameter.shape != shared[name].shape:
            raise PatchbayesError(
                f"worker {number}: the network has another shape at {name} than that of the training."
            )
        parameter.data = shared[name]
    optimizer = build_optimizer(config, network, likelihood)
    turns = Turns(config, loss, optimizer, dataset)
    training = HandTraining(config, loss, optimizer.param_groups, dataset)
    beat = shared[HEARTBEAT]

    def stepped() -> bool:
        beat[number] += 1
        return True

    while True:
        task = given.get()
        take_buffers_(loss, shared)
        turns.begin("patched", keep=False)
        statistics = RunningStatistics(network)
        found = training.train_(Phase(task["first"], task["last"]), task["hand"], stepped)
        assert found is not None
        shared[CHANGES][task["hand"]], shared[STEPS][task["hand"]] = statistics.flat(), found.steps
        answer = {"hand": task["hand"], "nll": found.nll, "steps": found.steps}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
