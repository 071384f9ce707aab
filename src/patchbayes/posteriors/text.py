"""Methods as text: "ecmp(5, jitter=0.3)", or rules for several kinds of layers, "norm: emp(5); linear: dropout(0.1)".

The names are those of the constructors, in any case; the fields are the constructors' own, so a new method is known here as
soon as its class is defined. Values are literals of Python and are never evaluated.
"""

import ast
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

from ..errors import PatchbayesError
from .method import Method, constructors

Constructor = Callable[..., Method]

#: The method of a network that is not patched.
VANILLA = "vanilla"
#: Options of methods that were settings of a run in 0.1.0, beside the method's name.
FLAT_OPTIONS = ("components", "rate", "jitter", "init", "per_example")


def parse_method(text: str) -> Method:
    """The method that a text such as "emp(5, jitter=0.3)" describes; a name alone, "emp", takes the defaults."""
    name, arguments, keywords = _parts(text)
    constructor = _constructor(name, text)
    fields = inspect.signature(constructor)
    unknown = [key for key in keywords if key not in fields.parameters]
    if unknown:
        close = difflib.get_close_matches(unknown[0], list(fields.parameters), 1)
        meant = f"; did you mean {close[0]!r}?" if close else "."
        _refuse(text, f"{constructor.__name__} has no field {unknown[0]!r}{meant}", constructor)
    try:
        fields.bind(*arguments, **keywords)
    except TypeError as error:
        _refuse(text, f"{constructor.__name__}: {error}.", constructor)
    try:
        return constructor(*arguments, **keywords)
    except TypeError as error:  # a value of a type that the constructor does not expect
        _refuse(text, f"{constructor.__name__}: {error}.", constructor)


def parse_rules(text: str, default_sites: str | None = None) -> dict[str, Method]:
    """Sites and methods of a text, as `patch_` takes them: "norm: emp(5); linear: dropout(0.1)".

    A method without sites is put on `default_sites`, by default on those that the method itself names.
    """
    rules: dict[str, Method] = {}
    parts = [part.strip() for part in _split(text, ";")]
    for part in parts:
        sites, *rest = (piece.strip() for piece in _split(part, ":"))
        if not rest:
            if len(parts) > 1:
                raise PatchbayesError(
                    f"method {text!r}: {part!r} does not say which layers it is for.\n"
                    '  do       write each rule as "sites: method", such as "norm: emp(5); linear: dropout(0.1)".'
                )
            method = parse_method(part)
            return {default_sites or method.default_sites: method}
        method = parse_method(":".join(rest))
        if not sites or sites in rules:
            what = f"{sites!r} has two rules" if sites else f"{part!r} names no layers"
            raise PatchbayesError(f"method {text!r}: {what}.")
        rules[sites] = method
    return rules


def text_of(method: Method) -> str:
    """The text that `parse_method` reads as this method: the first field, and every other that is not at its default."""
    makers: list[Constructor] = [made for made in constructors().values() if not isinstance(made, type)]
    makers.append(type(method))
    found = {made.__name__.lower(): _arguments(made, method) for made in makers}
    written = {name: arguments for name, arguments in found.items() if arguments is not None}
    if not written:
        raise PatchbayesError(f"{method!r} has no textual form: its constructor does not take its fields.")
    name = min(written, key=lambda name: len(written[name]))
    return f"{name}({', '.join(written[name])})" if written[name] else name


def text_of_rules(rules: dict[str, Method]) -> str:
    """The text that `parse_rules` reads as these rules."""
    return "; ".join(f"{sites}: {text_of(method)}" for sites, method in rules.items())


class Upgraded(NamedTuple):
    """What a run of 0.1.0 was told about its method: the text, the sites, and how much gradient its components shared."""

    text: str
    sites: str | None
    sharing: float


def upgraded(name: str, options: Mapping[str, Any], sites: str | None) -> Upgraded:
    """The method of a run of 0.1.0, which had options beside the name, with the defaults of that version."""
    given = {option: value for option, value in options.items() if value is not None and value is not False}
    if given and ("(" in name or ":" in name or name == VANILLA):
        option, value = next(iter(given.items()))
        raise PatchbayesError(
            f"{option}={value!r} was given beside the method {name!r}.\n"
            "  do       write options into the method, such as emp(5, jitter=0.3) or dropout(0.1)."
        )
    if name in ("dropout", "dropconnect"):
        given.setdefault("rate", 0.005)
    if name == "meanfield" and "jitter" in given:
        given["scale"] = given.pop("jitter")
    if name == "dropconnect" and sites is None:
        sites = "norm+output"
    arguments = ", ".join(f"{option}={value!r}" for option, value in given.items())
    return Upgraded(f"{name}({arguments})" if given else name, sites, 0.5 if name in ("emp", "ecmp") else 0.0)


def _parts(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, arguments and keyword arguments of a call that is written in a text."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        _not_understood(text)
    if isinstance(node, ast.Name):
        return node.id, [], {}
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        _not_understood(text)
    keywords = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            _not_understood(text)
        keywords[keyword.arg] = _literal(text, keyword.value)
    return node.func.id, [_literal(text, argument) for argument in node.args], keywords


def _literal(text: str, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        written = ast.unparse(node)
        quoted = f'; quote a word: "{written}"' if isinstance(node, ast.Name) else ""
        raise PatchbayesError(
            f"method {text!r}: expected a number, a quoted word, true or false (True, False), None or a tuple of these, "
            f"got {written}{quoted}."
        ) from None


def _not_understood(text: str) -> NoReturn:
    raise PatchbayesError(
        f"method {text!r}: expected a name with its fields, such as emp(5), ecmp(5, jitter=0.3) or dropout(0.1).\n"
        f"  known    {', '.join(sorted(constructors()))}"
    ) from None


def _constructor(name: str, text: str) -> Constructor:
    known = constructors()
    if name.lower() not in known:
        close = difflib.get_close_matches(name.lower(), list(known), 1)
        raise PatchbayesError(
            f"method {text!r}: there is no method {name!r}{f'; did you mean {close[0]!r}?' if close else '.'}\n"
            f"  known    {', '.join(sorted(known))}\n"
            "  do       import the module that defines it first, where it is a method of your own."
        )
    return known[name.lower()]


def _refuse(text: str, why: str, constructor: Constructor) -> NoReturn:
    fields = (
        field.name if field.default is field.empty else f"{field.name}={field.default!r}"
        for field in _fields(constructor)
    )
    raise PatchbayesError(f"method {text!r}: {why}\n  fields   {', '.join(fields)}") from None


def _fields(constructor: Constructor) -> list[inspect.Parameter]:
    return list(inspect.signature(constructor).parameters.values())


def _arguments(constructor: Constructor, method: Method) -> list[str] | None:
    """The arguments as text; None where the constructor cannot make this method."""
    values: dict[str, Any] = {}
    for field in _fields(constructor):
        if hasattr(method, field.name):
            values[field.name] = getattr(method, field.name)
        elif field.name == "rate" and getattr(method, "probabilities", None):  # of the zero component, the last
            values[field.name] = method.probabilities[-1]  # type: ignore[attr-defined]
        elif field.name == "learn_rate" and hasattr(method, "learn_probabilities"):
            values[field.name] = method.learn_probabilities
        else:
            return None
    try:
        if constructor(**values) != method:
            return None
    except (PatchbayesError, TypeError):
        return None
    written = []
    for number, field in enumerate(_fields(constructor)):
        value = values[field.name]
        if number == 0 and field.kind is field.POSITIONAL_OR_KEYWORD:
            written.append(repr(value))
        elif value != field.default:
            written.append(f"{field.name}={value!r}")
    return written


def _split(text: str, mark: str) -> Iterator[str]:
    """The text cut at every mark that stands outside brackets and quotes."""
    depth, quote, start = 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == mark and depth == 0:
            yield text[start:place]
            start = place + 1
    yield text[start:]
