"""The scikit-learn estimators on ten small sets, beside scikit-learn's own network and a random forest, all by default.

Five sets of classes and five of numbers, bundled with scikit-learn or from the UCI folder of the data directory (at most 1,500
training rows of each). MLPs are given standardized inputs and targets; the rivals' intervals in regression are constant, from
the residuals of the same 15 % of rows that ours holds out. Resumable: fits that are in the record are not made again.

    python benchmarks/sklearn_sets.py [--seeds 0 1 2] [--data-dir FOLDER] [--results FOLDER]
"""

import argparse
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import RESULTS, write_record
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import patchbayes as pb
from patchbayes.data import read
from patchbayes.integrations.sklearn import PatchBayesClassifier, PatchBayesRegressor
from patchbayes.metrics import aurc

CLASSES = ("iris", "wine", "breast_cancer", "digits", "uci:wine")
NUMBERS = ("diabetes", "uci:concrete", "uci:energy", "uci:kin8nm", "uci:power")
CONTESTANTS = ("patchbayes", "mlp", "forest")
MOST_ROWS, HELD_OUT, LEVEL = 1500, 0.15, 0.9

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def split_of(name: str, seed: int, data_dir: str | None) -> Split:
    """Training rows, test rows, their targets: the published split of a UCI set, or 70 to 30 by the seed."""
    if name.startswith("uci:"):
        data = read(name, data_dir, seed=seed, split=seed)
        parts = [part.fetch(torch.arange(len(part))) for part in (data.train, data.test)]
        (train, train_y), (test, test_y) = ((x.double().numpy(), y.double().numpy()[:, 0]) for x, y in parts)
    else:
        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        train, test, train_y, test_y = train_test_split(x, y, test_size=0.3, random_state=seed)
    rows = np.random.RandomState(seed).permutation(len(train))[:MOST_ROWS]
    if name in CLASSES:
        train_y, test_y = train_y.round().astype(int), test_y.round().astype(int)
    return train[rows], test, train_y[rows], test_y


def classifier(contestant: str, seed: int) -> Any:
    if contestant == "patchbayes":
        return PatchBayesClassifier(random_state=seed)
    if contestant == "mlp":
        return make_pipeline(StandardScaler(), MLPClassifier(random_state=seed))
    return RandomForestClassifier(random_state=seed)


def regressor(contestant: str, seed: int) -> Any:
    if contestant == "patchbayes":
        return PatchBayesRegressor(random_state=seed)
    if contestant == "mlp":
        scaled = make_pipeline(StandardScaler(), MLPRegressor(random_state=seed))
        return TransformedTargetRegressor(scaled, transformer=StandardScaler())
    return RandomForestRegressor(random_state=seed)


def of_classes(split: Split, contestant: str, seed: int) -> dict[str, Any]:
    """Accuracy and NLL; a class that training has not seen counts with the smallest number. Of ours also the areas under the
    risk-coverage curve by three scores."""
    train, test, train_y, test_y = split
    began = time.process_time()
    model = classifier(contestant, seed).fit(train, train_y)
    seconds = time.process_time() - began
    known = np.isin(test_y, model.classes_)
    probs = model.predict_proba(test)
    nll = log_loss(test_y[known], probs[known], labels=model.classes_) * known.mean()
    nll += -math.log(np.finfo(float).eps) * (~known).mean()
    right = model.predict(test) == test_y
    found: dict[str, Any] = {"score": float(right.mean()), "nll": float(nll), "seconds": seconds}
    if contestant == "patchbayes":
        said = pb.predict(model.network_, torch.tensor(test), model.predictor_.draws)
        scores = {
            "confidence": said.confidence,
            "entropy": -said.entropy,
            "mutual information": -said.mutual_information,
        }
        found["aurc"] = {name: aurc(score, torch.tensor(right)) for name, score in scores.items()}
    return found


def of_numbers(split: Split, contestant: str, seed: int) -> dict[str, float]:
    """RMSE over the targets' deviation, NLL of a Gaussian with the predicted moments, coverage and width of 90 % intervals."""
    train, test, train_y, test_y = split
    unit = float(train_y.std())
    began = time.process_time()
    if contestant == "patchbayes":
        model = regressor(contestant, seed).fit(train, train_y)
        mean, deviation = model.predict(test, return_std=True)
        low, high = model.predict_interval(test, LEVEL).T
    else:
        fitted, away, fitted_y, away_y = train_test_split(train, train_y, test_size=HELD_OUT, random_state=seed)
        model = regressor(contestant, seed).fit(fitted, fitted_y)
        residuals = np.sort(np.abs(away_y - model.predict(away)))
        reach = residuals[min(len(residuals), math.ceil((len(residuals) + 1) * LEVEL)) - 1]
        mean, deviation = model.predict(test), np.full(len(test), float(np.sqrt((residuals**2).mean())))
        low, high = mean - reach, mean + reach
    seconds = time.process_time() - began
    nll = 0.5 * (np.log(2 * math.pi * (deviation / unit) ** 2) + ((test_y - mean) / deviation) ** 2).mean()
    return {
        "score": float(np.sqrt(((test_y - mean) ** 2).mean()) / unit),
        "nll": float(nll),
        "coverage": float(((low <= test_y) & (test_y <= high)).mean()),
        "width": float((high - low).mean() / unit),
        "seconds": seconds,
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--sets", nargs="+", choices=[*CLASSES, *NUMBERS], default=[*CLASSES, *NUMBERS])
    parser.add_argument("--data-dir", default=os.environ.get("PATCHBAYES_DATA"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    path = arguments.results / "sklearn_sets.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {(row["set"], row["seed"], row["contestant"]) for row in rows}
    for seed in arguments.seeds:
        for name in arguments.sets:
            measure: Callable[..., dict[str, Any]] = of_classes if name in CLASSES else of_numbers
            for contestant in CONTESTANTS:
                if (name, seed, contestant) in done:
                    continue
                split = split_of(name, seed, arguments.data_dir)
                row = {"set": name, "seed": seed, "contestant": contestant, "rows": len(split[0])}
                rows.append(row | measure(split, contestant, seed))
                print(rows[-1], flush=True)
                write_record("sklearn_sets", {"rows": rows}, arguments.results)
    print("written:", path)


if __name__ == "__main__":
    main()
