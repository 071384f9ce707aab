"""Tables of the prediction engine, from its records: speed, memory, capturing, first calls, serving."""

import statistics
from typing import Any

NAMES = {
    "mlp": "MLP 2x50",
    "resnet20": "ResNet-20, 32 px",
    "resnet18": "ResNet-18, 32 px",
    "resnet18_224": "ResNet-18, 224 px",
}


def early_stopping(record: dict[str, Any]) -> str:
    low, high = record["ratio_quartiles"]
    return (
        f"`draws='auto', tolerance={record['tolerance']}` on {record['inputs']} test images of CIFAR-100 and a "
        f"ResNet-20 that others trained ({record['method']}, norm and output patched): {record['draws_used']:.0f} draws for an "
        f"input on average, {record['inputs_with_all_draws']} inputs take all {record['draws']}; {record['ratio']:.2f} of the "
        f"time of all draws (quartiles {low:.2f}-{high:.2f}, {record['rounds']} rounds), and no top probability moves by more "
        f"than {record['largest_change_of_top']:.3f}. Measured {circumstances(record)}. Command: `{record['command']}`."
    )


def serving(record: dict[str, Any]) -> str:
    lines = [
        "| batch | clients | | p50 ms | p99 ms | times plain | answers a second | resident MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = [row for row in record["rows"] if "unavailable" not in row]
    for row in sorted(rows, key=lambda row: (row["batch"], row["clients"])):
        ratio = f"{row['times_plain']:.2f}" if "times_plain" in row else "1"
        lines.append(
            f"| {row['batch']} | {row['clients']} | {row['name']} | {1e3 * row['p50']:.3g} | {1e3 * row['p99']:.3g} | {ratio} "
            f"| {row['per_second']:.3g} | {row['resident'] / 1e6:.0f} |"
        )
    missing = "".join(f" {row['name']}: {row['unavailable']}." for row in record["rows"] if "unavailable" in row)
    text = f"ResNet-20, 32 px, {record['draws']} draws, one torch thread a request, on one core."
    return "\n".join([*lines, "", f"{text} Measured {circumstances(record)}.{missing} Command: `{record['command']}`."])


def capture(record: dict[str, Any]) -> str:
    lines = [
        "| library | networks | captured | first call, median s | slowest | largest difference to the loop |",
        "|---|---|---|---|---|---|",
    ]
    rows = record["rows"]
    for library in dict.fromkeys(row["library"] for row in rows):
        own = [row for row in rows if row["library"] == library]
        done = [row for row in own if row["captured"]]
        slowest = max(done, key=lambda row: row["first_call_seconds"])
        lines.append(
            f"| {library} | {len(own)} | {len(done)} | {statistics.median(row['first_call_seconds'] for row in done):.1f} "
            f"| {slowest['first_call_seconds']:.1f} ({slowest['network']}) "
            f"| {max(row['largest_difference'] for row in done):.1e} |"
        )
    refused = "".join(f" {row['network']}: {row['reason']}." for row in rows if not row["captured"])
    text = "Norms and output patched, two draws; seconds of the processor for the first call. Measured"
    return "\n".join([*lines, "", f"{text} {circumstances(record)}.{refused} Command: `{record['command']}`."])


def before_after(record: dict[str, Any]) -> str:
    """Two versions of the engine against their loops, by network."""
    lines = [
        "| network | cells | engine / loop, median: before, now | worst: before, now | above 1.05: before, now "
        "| now / before: median, worst |",
        "|---|---|---|---|---|---|",
    ]
    cells = record["cells"]
    groups = {
        NAMES[name]: [c for c in cells if c["network"] == name] for name in dict.fromkeys(c["network"] for c in cells)
    }
    groups |= {"all, batch 8": [cell for cell in cells if cell["batch"] == 8], "all": cells}
    for name, some in groups.items():
        before, after = ([cell[key] for cell in some] for key in ("ratio_before", "ratio"))
        lines.append(
            f"| {name} | {len(some)} | {statistics.median(before):.3f}, {statistics.median(after):.3f} "
            f"| {max(before):.3f}, {max(after):.3f} | {sum(b > 1.05 for b in before)}, {sum(a > 1.05 for a in after)} "
            f"| {statistics.median(c['after_before'] for c in some):.2f}, {max(c['after_before'] for c in some):.2f} |"
        )
    numbers = ", ".join(str(n) for n in sorted({cell["draws"] for cell in cells}))
    batches = ", ".join(str(n) for n in sorted({cell["batch"] for cell in cells}))
    text = (
        f"The engine of 0.1 (commit {record['before']}) and that on the captured graph, taking turns in one run; norms and "
        f"output or the last block patched, EMP and ECMP, batch {batches}, S = {numbers}, the same independent draws as the "
        f"loop; seconds of the processor, {circumstances(record)}. Command: `{record['command']}`."
    )
    return "\n".join([*lines, "", text])


def before_after_cells(record: dict[str, Any]) -> str:
    """All cells of the same."""
    lines = [
        "| network | patched | method | batch | S | loop, s | engine, s | engine / loop (quartiles) | engine / loop before "
        "| now / before |",
        "|---" * 10 + "|",
    ]
    for cell in record["cells"]:
        mark, (low, high) = "~" if cell["scaled"] else "", cell["ratio_quartiles"]
        lines.append(
            f"| {NAMES[cell['network']]} | {'last block, output' if cell['sites'] == 'last' else 'norm, output'} "
            f"| {cell['method'].upper()} | {cell['batch']} | {cell['draws']} | {mark}{cell['loop']:.3g} "
            f"| {mark}{cell['engine']:.3g} | {cell['ratio']:.3f} ({low:.3f}-{high:.3f}) "
            f"| {cell['ratio_before']:.3f} | {cell['after_before']:.2f} |"
        )
    return "\n".join(lines)


def large(record: dict[str, Any]) -> str:
    """BERT, and an output layer of 1,000 classes."""
    lines = ["| network, patched | S | passes for S draws (quartiles) | of the loop |", "|---|---|---|---|"]
    for row in record["bert"]:
        low, high = row["passes_quartiles"]
        lines.append(
            f"| BERT, 6 layers of 384, {row['sites']} | {row['draws']} | {row['passes']:.2f} ({low:.2f}-{high:.2f}) "
            f"| {row['ratio']:.3f} |"
        )
    head = record["head"]
    low, high = head["passes_quartiles"]
    lines.append(
        f"| ResNet-18, 224 px, output of 1,000 classes, {head['batches']} batches | {head['draws']} "
        f"| {head['passes']:.2f} ({low:.2f}-{high:.2f}) for each batch | |"
    )
    text = f"ECMP, batch 8, in passes of the unpatched network; seconds of the processor, {circumstances(record)}."
    return "\n".join([*lines, "", f"{text} Command: `{record['command']}`."])


def resident(record: dict[str, Any]) -> str:
    rows = {row["name"]: row for row in record["rows"]}
    more = (rows["graph"]["end"] - rows["plain"]["end"]) / 1e6
    grown = (rows["graph"]["end"] - rows["graph"]["start"]) / 1e6
    return (
        f"Resident memory after {record['predictions']:,} predictions of 1 to 200 images each, {record['draws']} draws of a "
        f"small CNN: {more:.0f} MB above that of as many plain passes ({grown:.0f} MB more than after the first "
        f"prediction, which loads `torch.export`). Measured {circumstances(record)}. "
        f"Command: `{record['command']}`."
    )


def export_time(record: dict[str, Any]) -> str:
    """Exported predictors beside `predict`."""
    titles = {
        "cnn": "small CNN, 16 px",
        "vit": "ViT",
        "bert": "BERT",
        "mlp": "MLP 2x50",
        "regression": "MLP 2x50, regression",
    }
    lines = [
        "| network | largest difference to `predict` | onnxruntime, ms | `predict`, ms | onnxruntime / `predict` (quartiles) "
        "| / `Predictor` | file, kB | seconds to write |",
        "|---" * 8 + "|",
    ]
    for row in record["rows"]:
        low, high = row["ratio_quartiles"]
        lines.append(
            f"| {titles[row['name']]} | {row['difference']:.1e} | {1e3 * row['onnx']:.3g} | {1e3 * row['predict']:.3g} "
            f"| {row['ratio']:.2f} ({low:.2f}-{high:.2f}) | {row['of_predictor']:.2f} | {row['size'] / 1e3:.0f} "
            f"| {row['seconds_to_write']:.0f} |"
        )
    text = f"Norms and output patched, ECMP, {record['draws']} draws, batch {record['batch']}; transformers: 2 layers of 64."
    return "\n".join([*lines, "", f"{text} Measured {circumstances(record)}. Command: `{record['command']}`."])


def first_call(record: dict[str, Any]) -> str:
    """First calls, and the engine beside busy processes."""
    lines = [
        "| network, batch 8 | S | first call ran | first call, ms | of it capturing | the loop, ms | besides capturing, "
        "of the loop (quartiles) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["first"]:
        low, high = row["besides_quartiles"]
        lines.append(
            f"| {row['network']} | {row['draws']} | {'the graph' if row['engine'] == 'graph' else 'the loop'} "
            f"| {1e3 * row['first']:.3g} | {1e3 * row['capture']:.3g} | {1e3 * row['loop']:.3g} "
            f"| {row['besides']:.2f} ({low:.2f}-{high:.2f}) |"
        )
    text = "Norms and output patched, ECMP; seconds of the processor, median of"
    lines += ["", f"{text} {record['rounds']} networks, {circumstances(record)}. Command: `{record['command']}`."]
    for row in record.get("busy", []):
        same = "the same plan" if row["same_plan"] else "ANOTHER PLAN"
        lines += [
            "",
            f"ResNet-18 of width 32 at 32 pixels, {row['name']}, S = {row['draws']}, {row['threads']} threads: engine / loop "
            f"{row['alone']:.2f} alone, {row['busy']:.2f} beside two busy processes, {same}.",
        ]
    return "\n".join(lines)


def circumstances(record: dict[str, Any]) -> str:
    machine = record["machine"]
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return f"on {machine['processor']}, {threads}, commit {record['commit']}"
