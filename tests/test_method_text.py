"""Methods as text: parsed and written back, checked against the constructors' own fields, never evaluated."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from patchbayes.posteriors import GaussianNoise, Method
from patchbayes.posteriors.text import parse_method, parse_rules, text_of, text_of_rules

METHODS = {
    "emp": pb.EMP(5),
    "emp(3)": pb.EMP(3),
    "EMP(components=3)": pb.EMP(3),
    "ecmp(5, jitter=0.3)": pb.ECMP(5, jitter=0.3),
    " ecmp( 5 , jitter = 0.3 ) ": pb.ECMP(5, jitter=0.3),
    'ecmp(init="independent", per_example=True)': pb.ECMP(5, init="independent", per_example=True),
    "emp(2, probabilities=(0.9, 0.1))": pb.EMP(2, probabilities=(0.9, 0.1)),
    "ensemble(2)": pb.Ensemble(2),
    "ensemble(2, init='copies', jitter=0.2)": pb.Ensemble(2, init="copies", jitter=0.2),
    "dropout(0.1)": pb.Dropout(0.1),
    "dropconnect(0.1)": pb.posteriors.DropConnect(0.1),
    "meanfield": pb.posteriors.MeanField(),
    "MeanField(scale=0.3)": pb.posteriors.MeanField(scale=0.3),
    "gaussiannoise(0.2)": GaussianNoise(0.2),
    "mixture(3, tie='unit', zero=True)": pb.posteriors.Mixture(3, tie="unit", zero=True),
}


@pytest.mark.parametrize("text", METHODS)
def test_a_text_is_read_as_the_method_it_describes_and_written_back(text):
    method = parse_method(text)
    assert method == METHODS[text]
    assert parse_method(text_of(method)) == method


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (pb.EMP(), "emp(5)"),
        (pb.ECMP(5, jitter=0.3), "ecmp(5, jitter=0.3)"),
        (pb.ECMP(4, init="independent"), "ecmp(4, init='independent')"),
        (pb.Dropout(0.005), "dropout(0.005)"),
        (pb.posteriors.DropConnect(0.1), "dropconnect(0.1)"),
        (pb.posteriors.DropConnect(0.1, learn_rate=True), "dropconnect(0.1, learn_rate=True)"),
        (pb.Ensemble(3), "ensemble(3)"),
        (pb.posteriors.MeanField(), "meanfield(0.1)"),
        (GaussianNoise(0.2), "gaussiannoise(0.2)"),
        (pb.posteriors.Mixture(3, tie="unit"), "mixture(3, tie='unit')"),
    ],
)
def test_the_text_of_a_method_is_the_shortest(method, text):
    assert text_of(method) == text


@given(
    st.sampled_from([pb.EMP, pb.ECMP, pb.Ensemble]),
    st.integers(1, 50),
    st.floats(0, 10),
    st.floats(0, 1),
    st.sampled_from([None, 0.2]),
)
def test_any_mixture_comes_back_from_its_text(constructor, components, jitter, sigma, norm_scale):
    method = constructor(components, jitter=jitter, sigma=sigma, norm_scale=norm_scale)
    assert parse_method(text_of(method)) == method


@given(st.floats(0, 1, exclude_max=True))
def test_any_rate_comes_back_from_its_text(rate):
    for method in (pb.Dropout(rate), pb.posteriors.DropConnect(rate)):
        assert parse_method(text_of(method)) == method


def test_a_method_of_the_user_is_known_as_soon_as_it_is_defined():
    @dataclass(frozen=True)
    class Whisper(Method):
        volume: float
        often: bool = False

        @property
        def label(self):
            return "Whisper"

        def posterior(self, module, generator=None):
            raise NotImplementedError

        from_module = posterior

    method = parse_method("whisper(0.5, often=True)")
    assert method == Whisper(0.5, often=True)
    assert text_of(method) == "whisper(0.5, often=True)"
    with pytest.raises(PatchbayesError, match="Whisper has no field 'loud'"):
        parse_method("whisper(0.5, loud=1)")


def test_rules_name_their_layers():
    assert parse_rules("norm: emp(5); linear: dropout(0.1)") == {"norm": pb.EMP(5), "linear": pb.Dropout(0.1)}
    assert parse_rules("layer4.*+output: emp(2, probabilities=(0.5, 0.5))") == {
        "layer4.*+output": pb.EMP(2, probabilities=(0.5, 0.5))
    }
    assert parse_rules("emp(3)", "output") == {"output": pb.EMP(3)}
    rules = {"norm": pb.EMP(5), "conv+linear": pb.posteriors.DropConnect(0.1)}
    assert parse_rules(text_of_rules(rules)) == rules


@pytest.mark.parametrize(
    ("method", "sites"),
    [
        ("emp", "norm+output"),
        ("ecmp", "norm+output"),
        ("dropout(0.1)", "norm"),
        ("dropconnect(0.1)", "linear+conv"),  # table 2 puts it on weight matrices
        ("meanfield", "all"),
        ("ensemble", "all"),
    ],
)
def test_a_method_without_layers_goes_where_the_paper_puts_it(method, sites):
    assert list(parse_rules(method)) == [sites]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a name with its fields"),
        ("emp(5", "expected a name with its fields"),
        ("5", "expected a name with its fields"),
        ("emp(5)(3)", "expected a name with its fields"),
        ("pb.EMP(5)", "expected a name with its fields"),
        ("emp(**{'components': 3})", "expected a name with its fields"),
        ("emp(5) + emp(3)", "expected a name with its fields"),
        (
            "bayes(3)",
            r"there is no method 'bayes'.\n  known    batchensemble, bayesbybackprop, dropconnect, dropout, ecmp",
        ),
        ("epm(3)", "did you mean 'emp'"),
        ("emp(5, jiter=0.3)", r"EMP has no field 'jiter'; did you mean 'jitter'\?\n  fields   components=5,"),
        ("dropout(0.1, components=3)", r"Dropout has no field 'components'.\n  fields   rate"),
        ("dropout", r"Dropout: missing a required argument: 'rate'.\n  fields   rate"),
        ("emp(1, 2)", r"EMP: too many positional arguments.\n  fields   components"),
        ("emp(1, components=2)", "EMP: multiple values for argument 'components'"),
        ("emp(0)", "components=0"),
        ("emp('five')", "components='five'"),
        ("dropout(1.5)", "rate=1.5"),
        ("emp(init=independent)", 'got independent; quote a word: "independent"'),
        ("emp(components=print('run'))", r"expected a number.* got print\('run'\)"),
        ("emp(__import__('os').getpid())", "expected a number"),
        ("norm: emp(5); norm: ecmp(5)", "'norm' has two rules"),
        (": emp(5)", "names no layers"),
        ("emp(5); linear: dropout(0.1)", r"'emp\(5\)' does not say which layers it is for"),
        ("norm: emp(5); ", "expected a name with its fields|does not say which layers"),
        ("(" * 5000, "expected a name with its fields"),
    ],
)
def test_what_is_not_understood_is_said(text, said, capsys):
    with pytest.raises(PatchbayesError, match=said):
        parse_rules(text)
    assert capsys.readouterr().out == ""


@given(st.text(alphabet="emp(5,=0.3)[]{}:;'\" \\\n", max_size=30))
def test_any_text_is_a_method_or_a_clear_refusal(text):
    try:
        rules = parse_rules(text)
    except PatchbayesError:
        return
    assert parse_rules(text_of_rules(rules)) == rules
