"""How draws are written in a file: seeds, counters and probabilities as JSON."""

from typing import Any

from .layout import Layout, Probabilities, Scheme, Series

_MOST_DRAWS = 10**7  # what takes longer than anybody waits


def series_to_json(part: Series) -> dict[str, Any]:
    return {
        "scheme": part.scheme,
        "seed": part.seed,
        "counters": _counters_to_json(part.counters),
        "heads": part.heads,
        "head_span": part.head_span,
    }


def series_from_json(content: Any) -> Series:
    """A KeyError, TypeError or ValueError where the content is something else."""
    counters = _counters_from_json(content["counters"])
    seed, heads, head_span = (_whole(content[key]) for key in ("seed", "heads", "head_span"))
    return Series(_scheme(content["scheme"]), seed, counters, heads, head_span)


def _counters_to_json(counters: range | tuple[int, ...]) -> Any:
    if isinstance(counters, range):
        return {"start": counters.start, "stop": counters.stop, "step": counters.step}
    return list(counters)


def _counters_from_json(content: Any) -> range | tuple[int, ...]:
    if isinstance(content, dict):
        found = range(*(_whole(content[key]) for key in ("start", "stop", "step")))
        if len(found) > _MOST_DRAWS:
            raise ValueError(f"{len(found):,} draws, and more than {_MOST_DRAWS:,} are refused")
        return found
    return tuple(map(_whole, content))


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise ValueError(f"{str(value)[:40]} is not a whole number of 64 bits")
    return value


def probabilities_from_json(content: Any, layout: Layout) -> list[Probabilities]:
    """The probabilities of a file, checked: for each span None, or a number for each outcome."""
    found: list[Probabilities] = [None if p is None else tuple(float(x) for x in p) for p in content]
    sizes = [span.outcomes if p is None else len(p) for p, span in zip(found, layout.spans, strict=True)]
    if sizes != [span.outcomes for span in layout.spans] or any(not min(p) >= 0 for p in found if p is not None):
        raise ValueError("probabilities")
    return found


def _scheme(text: str) -> Scheme:
    if text not in ("iid", "stratified", "orthogonal", "enumerated"):
        raise KeyError(text)
    return text  # type: ignore[return-value]
