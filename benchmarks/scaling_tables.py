"""The tables of docs/devices.md, from results/scaling.json; `readme_tables.py` puts them there."""

import math
import statistics
from typing import Any

#: What the table for many ranks assumes of the network between them.
LATENCY, BANDWIDTH = 20e-6, 10e9  # seconds of a message, bytes a second
RANKS = (8, 64, 512)


def steps(record: dict[str, Any]) -> str:
    """A step by components and kind, in milliseconds and against plain training."""
    lines = ["| K, patched | plain step | turn of the patches | turn of the shared | components apart | prefix kept |"]
    lines.append("|---|---|---|---|---|---|")
    for name, row in record["step_seconds"].items():
        seconds = row["seconds"]
        plain = seconds["plain"]
        cells = [
            f"{1000 * seconds[k]:.1f} ms (x {seconds[k] / plain:.2f})"
            for k in ("turn of the patches", "turn of the shared", "hand")
        ]
        kept = f"{row['prefix_bytes']:,} bytes an image" if row["prefix_kept"] else "no"
        lines.append(f"| {name} | {1000 * plain:.1f} ms | {' | '.join(cells)} | {kept} |")
    return "\n".join([*lines, "", _footer(record)])


def _footer(record: dict[str, Any]) -> str:
    settings, machine = record["settings"], record["machine"]
    return (
        f"`{settings['model']}` on {settings['data']}, batches of {settings['batch_size']}, Adam; processor seconds of one "
        f"thread on {machine['processor']}, torch {record['versions']['torch']}, commit {record['commit']}. Command: "
        f"`{record['command']}`."
    )


def seconds_after(record: dict[str, Any], trajectory: dict[str, Any], epochs: int, processes: int) -> float:
    """Processor seconds that so many epochs took on each process, from the steps of each kind and their times.

    Phases of components apart are divided over the processes, hand by hand; all else is not.
    """
    seconds = record["step_seconds"][f"{trajectory['components']}, norm+output"]["seconds"]
    steps_per_epoch = -(-record["settings"]["num_data"] // record["settings"]["batch_size"])
    hands = trajectory["components"]
    total = 0.0
    for epoch in range(epochs):
        patched = bool(int(epoch // record["settings"]["turn"]) % 2)
        if trajectory["kind"] == "plain":
            total += steps_per_epoch * seconds["plain"]
        elif not patched:
            total += steps_per_epoch * seconds["turn of the shared"]
        elif trajectory["kind"] == "coordinate descent":
            total += steps_per_epoch * seconds["turn of the patches"]
        else:
            each = [len(range(hand, steps_per_epoch, hands)) for hand in range(hands)]
            total += max(sum(each[w::processes]) for w in range(processes)) * seconds["hand"]
    return total


def time_to_objective(record: dict[str, Any]) -> str:
    """How long each kind of training takes to the objective that plain training has at half of its epochs, over seeds."""
    lines = [
        "| K | kind | seeds that got there | time / plain's, one process | two processes | objective at the end |",
        "|---|---|---|---|---|---|",
    ]
    for components, kind in _groups(record["trajectories"]):
        group = _runs(record["trajectories"], components, kind)
        last = statistics.fmean(run["objective"][-1] for run in group.values())
        cells = []
        for processes in (1, 2):
            ratios = _time_ratios(record, components, kind, processes)
            cells.append(_ratio_text([ratio for ratio, _ in ratios]) if kind == "workers" or processes == 1 else "")
        there = sum(reached for _, reached in _time_ratios(record, components, kind, 1))
        lines.append(f"| {components} | {kind} | {there} of {len(group)} | {' | '.join(cells)} | {last:.4f} |")
    settings = record["settings"]
    seeds = len({run["seed"] for run in record["trajectories"]})
    after = (
        f"Objective: the negative ELBO in nats per example, that of plain training after {settings['target_epoch']} of "
        f"{settings['epochs']} epochs; turns of {settings['turn']:g} epochs; {seeds} seeds, the same settings for all, none "
        "tuned. Ratios are medians over seeds (least to largest) of steps times the step times above; where the objective was "
        "not reached, the whole run counts, and the ratio is a lower bound. Two processes divide the components, and nothing "
        "else, between them."
    )
    return "\n".join([*lines, "", after])


def _groups(runs: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return list(dict.fromkeys((run["components"], run["kind"]) for run in runs))


def _runs(runs: list[dict[str, Any]], components: int, kind: str) -> dict[int, dict[str, Any]]:
    """The runs of one kind by seed."""
    return {run["seed"]: run for run in runs if (run["components"], run["kind"]) == (components, kind)}


def _time_ratios(record: dict[str, Any], components: int, kind: str, processes: int) -> list[tuple[float, bool]]:
    """Seconds to the objective over plain training's, seed by seed, and whether it was reached."""
    epoch = record["settings"]["target_epoch"]
    plain, found = _runs(record["trajectories"], components, "plain"), []
    for seed, run in _runs(record["trajectories"], components, kind).items():
        target = plain[seed]["objective"][epoch]
        reached = next((e for e, value in enumerate(run["objective"]) if value <= target), None)
        seconds = seconds_after(record, run, record["settings"]["epochs"] if reached is None else reached, processes)
        first = next(e for e, value in enumerate(plain[seed]["objective"]) if value <= target)
        found.append((seconds / seconds_after(record, plain[seed], first, 1), reached is not None))
    return found


def _ratio_text(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def real_runs(record: dict[str, Any]) -> str:
    """Wall time of whole trainings to the training NLL that plain training has at half of its epochs."""
    lines = [
        "| K | kind | seeds that got there | wall time / plain's | an epoch, s | training NLL at the end |",
        "|---|---|---|---|---|---|",
    ]
    runs = record["real_runs"]
    for components, kind in _groups(runs):
        plain, ratios, there = _runs(runs, components, "plain"), [], 0
        group = _runs(runs, components, kind)
        for seed, run in group.items():
            half = len(plain[seed]["nll"]) // 2
            target = plain[seed]["nll"][half - 1]
            epochs = [
                next((e for e, value in enumerate(r["nll"]) if value <= target), None) for r in (run, plain[seed])
            ]
            there += epochs[0] is not None
            ratios.append(run["seconds"][-1 if epochs[0] is None else epochs[0]] / plain[seed]["seconds"][epochs[1]])
        epoch = statistics.median(run["seconds"][-1] / len(run["seconds"]) for run in group.values())
        last = statistics.fmean(run["nll"][-1] for run in group.values())
        lines.append(
            f"| {components} | {kind} | {there} of {len(group)} | {_ratio_text(ratios)} | {epoch:.2f} | {last:.4f} |"
        )
    after = (
        "`patchbayes train` on the bundled clothes with `small_resnet`, batches of 100, Adam, on two cores: training alone, "
        "without the start of the processes. Ratios and lower bounds as above."
    )
    return "\n".join([*lines, "", after])


def exchange(record: dict[str, Any]) -> str:
    """Bytes of a step under DDP."""
    lines = ["| network, what learns | parameters | exchanged in a step | of all |", "|---|---|---|---|"]
    rows = record["exchanged_bytes"]
    for name, row in rows.items():
        everything = 4 * row["parameters"]
        lines.append(f"| {name} | {row['parameters']:,} | {row['bytes']:,} bytes | {row['bytes'] / everything:.2%} |")
    variance = record["gradient_variance"]
    ratios = [f"{variance[f'own, {part}'] / variance[f'same, {part}']:.2f} ({part})" for part in ("shared", "patched")]
    after = (
        "Counted by a hook of DistributedDataParallel. Variance that the draws give to the gradient of "
        f"two processes, own draws against the same draws: {' and '.join(ratios)}; `small_cnn`, norms, K = 5, 60 draws of one "
        "batch."
    )
    return "\n".join([*lines, "", after])


def many_ranks(record: dict[str, Any]) -> str:
    """Step times on many ranks, computed from the measured parts and the assumptions."""
    seconds, rows = record["resnet18_seconds"], record["exchanged_bytes"]
    everything, patches = rows["resnet18, norm, all"]["bytes"], rows["resnet18, norm, patches"]["bytes"]
    lines = [
        "| ranks | all learn: step (efficiency) | patches alone | components apart, K = 50: speed-up |",
        "|---|---|---|---|",
    ]
    for ranks in RANKS:
        cells = []
        for learn, size in (("all", everything), ("patches", patches)):
            total = seconds[learn] + all_reduce(size, ranks)
            cells.append(f"{total:.3f} s ({seconds[learn] / total:.1%})")
        steps_, components = 1000, 50
        busy = math.ceil(components / ranks) * steps_ / components * seconds["patches"]
        apart = steps_ * seconds["patches"] / (busy + all_reduce(components * patches // 5, ranks))
        lines.append(f"| {ranks} | {cells[0]} | {cells[1]} | x {apart:.1f} |")
    after = (
        "Not measured but computed. Measured parts: a step of ResNet-18 with norm patches (4 images of 32 pixels a rank, one "
        f"thread) takes {seconds['all']:.2f} s, with patches alone {seconds['patches']:.2f} s; bytes as above. Assumed: every "
        f"rank has the same batch however many there are; a message takes {1e6 * LATENCY:.0f} microseconds and "
        f"{BANDWIDTH / 1e9:.0f} GB/s, an all-reduce 2 log2(P) messages and 2 (P - 1) / P of its bytes; nothing overlaps, no "
        "rank is slower than another. Components apart: a phase of 1,000 steps dealt to 50 hands and gathered once, against "
        "one rank; more ranks than components stay idle."
    )
    return "\n".join([*lines, "", after])


def all_reduce(size: int, ranks: int) -> float:
    """Seconds, by the assumptions."""
    return 2 * math.log2(ranks) * LATENCY + 2 * (ranks - 1) / ranks * size / BANDWIDTH


def two_processes(record: dict[str, Any]) -> str:
    """A step of plain data parallel training on one and on two processes."""
    found = record["two_processes"]
    lines = [
        "| K | one process | two processes, all learn | two processes, patches alone | bytes, all | bytes, patches |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for name, row in record["step_seconds"].items():
        components, _, sites = name.partition(", ")
        if sites == "norm+output":
            both = [found["steps"][f"{components}, {learn}"] for learn in ("all", "patches")]
            cells = [f"{1000 * one['seconds']:.1f} ms" for one in both] + [f"{one['bytes']:,}" for one in both]
            lines.append(f"| {components} | {1000 * row['seconds']['plain']:.1f} ms | {' | '.join(cells)} |")
    least = ", ".join(f"{int(size):,} bytes {1e6 * seconds:,.0f}" for size, seconds in found["all_reduce"].items())
    after = (
        "Processor seconds of each process. One process: the whole step. Two: forward and backward of half of the batch with "
        "what is spent on the exchange (gloo), without KL, optimizer and waiting. The fastest of ten all-reduces, in "
        f"microseconds of wall time: {least}."
    )
    return "\n".join([*lines, "", after])
