"""The tables of docs/devices.md, from results/scaling.json; `readme_tables.py` puts them there."""

import math
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
    """How long each kind of training takes to the objective that plain training has at half of its epochs."""
    epoch = record["settings"]["target_epoch"]
    lines = [
        "| K | objective | kind | epochs to it | one process | two processes | at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = {t["components"]: t for t in record["trajectories"] if t["kind"] == "plain"}
    for one in record["trajectories"]:
        target = plain[one["components"]]["objective"][epoch]
        reached = next((e for e, value in enumerate(one["objective"]) if value <= target), None)
        cells = ["not reached", "", ""]
        if reached is not None:
            times = [f"{seconds_after(record, one, reached, number):.2f} s" for number in (1, 2)]
            cells = [str(reached), times[0], times[1] if one["kind"] == "workers" else ""]
        lines.append(
            f"| {one['components']} | {target:.4f} | {one['kind']} | {' | '.join(cells)} | {one['objective'][-1]:.4f} |"
        )
    after = (
        f"Objective: the negative ELBO in nats per example. Turns of {record['settings']['turn']:g} epochs, "
        f"{record['settings']['epochs']} epochs in all, seed 0, the same settings for all, none tuned. Times are steps times "
        "the step times above; two processes divide the components, and nothing else, between them."
    )
    return "\n".join([*lines, "", after + verdict(record)])


def verdict(record: dict[str, Any]) -> str:
    """Where turns and workers were sooner at the objective than plain training, in a sentence each."""
    epoch = record["settings"]["target_epoch"]
    plain = {t["components"]: t for t in record["trajectories"] if t["kind"] == "plain"}
    text = ""
    for kind, processes in (("coordinate descent", 1), ("workers", 2)):
        sooner = []
        for one in record["trajectories"]:
            if one["kind"] == kind:
                base = plain[one["components"]]
                target = base["objective"][epoch]
                reached = next((e for e, value in enumerate(one["objective"]) if value <= target), None)
                if reached is not None and seconds_after(record, one, reached, processes) < seconds_after(
                    record, base, epoch, 1
                ):
                    sooner.append(str(one["components"]))
        where = f"sooner at K = {', '.join(sooner)} only" if sooner else "sooner at no K"
        text += f" Against plain training in one process, {kind}{' on two' if processes == 2 else ''}: {where}."
    return text


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
