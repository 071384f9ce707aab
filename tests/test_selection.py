"""Which layers a selection finds: words, joins, globs, predicates, rules; and what it says when there is nothing."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import patchbayes as pb
from patchbayes.errors import NothingToPatch, PatchbayesError


class Net(nn.Module):
    """Registered in another order than it runs: `first` runs last and `last` runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.conv = nn.Conv1d(2, 4, 3, padding=1)
        self.bn = nn.BatchNorm1d(4)
        self.act = nn.PReLU(4)
        self.middle = nn.Linear(4, 4)
        self.ln = nn.LayerNorm(4)
        self.last = nn.Conv1d(1, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.conv(self.last(x)))).mean(-1)
        return self.first(self.ln(self.middle(x)))


X = torch.randn(5, 1, 6, generator=torch.Generator().manual_seed(0))


def sites_of(model: nn.Module, sites, **options) -> list[str]:
    report = pb.patch_(model, pb.EMP(2), sites, **options)
    assert list(pb.patched_sites(model)) == [site.name for site in report.sites]
    return [site.name for site in report.sites]


@pytest.mark.parametrize(
    ("sites", "found"),
    [
        ("norm", ["bn", "ln"]),
        ("linear", ["first", "middle"]),
        ("conv", ["conv", "last"]),
        ("output", ["last"]),
        ("input", ["first"]),
        ("all", ["first", "conv", "bn", "act", "middle", "ln", "last"]),
        ("norm+output", ["bn", "ln", "last"]),
        ("norm + input+ output", ["first", "bn", "ln", "last"]),
        ("conv+conv", ["conv", "last"]),
        ("m*", ["middle"]),
        ("?n", ["bn", "ln"]),
        ("[bl]n+first", ["first", "bn", "ln"]),
        ("act", ["act"]),
        ("*", ["first", "conv", "bn", "act", "middle", "ln", "last"]),
    ],
)
def test_words_joins_and_globs_select_what_they_say(sites, found):
    assert sites_of(Net(), sites) == found


def test_the_default_is_norm_and_output():
    model = Net()
    report = pb.patch_(model, pb.EMP(2))
    assert [site.name for site in report.sites] == ["bn", "ln", "last"]


def test_globs_reach_into_submodules_and_case_counts():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert sites_of(model, "0.*") == ["0.0", "0.1"]
    with pytest.raises(NothingToPatch, match='no module named "FIRST"'):
        pb.patch_(Net(), pb.EMP(2), "FIRST")


def test_a_predicate_gets_name_and_module():
    seen = {}

    def wide(name: str, module: nn.Module) -> bool:
        seen[name] = module
        return isinstance(module, nn.Linear) and module.out_features == 3

    model = Net()
    modules = dict(model.named_modules())
    assert sites_of(model, wide) == ["first"]
    assert seen == modules


def test_several_rules_in_one_call_and_the_first_match_wins():
    model = Net()
    report = pb.patch_(
        model,
        {
            "bn": pb.EMP(2),
            "norm": pb.ECMP(3),
            lambda name, module: name == "first": pb.Dropout(0.1),
            "all": pb.posteriors.MeanField(),
        },
    )
    methods = {site.name: site.method for site in report.sites}
    assert methods == {
        "first": "Dropout(0.1)",
        "conv": "MeanField",
        "bn": "EMP(K=2)",
        "act": "MeanField",
        "middle": "MeanField",
        "ln": "ECMP(K=3)",
        "last": "MeanField",
    }


def test_the_order_of_rules_decides():
    model = Net()
    report = pb.patch_(model, {"norm": pb.ECMP(3), "bn+linear": pb.EMP(2)})
    assert {site.name: site.method for site in report.sites}["bn"] == "ECMP(K=3)"


def test_rules_replace_the_sites_argument():
    model = Net()
    pb.patch_(model, {"linear": pb.EMP(2)}, sites="norm")
    assert list(pb.patched_sites(model)) == ["first", "middle"]


# ---- what "norm" means


class LlamaRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class Standardize(nn.Module):
    """No "norm" in the name, but an eps."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class WeightNormedLinear(nn.Module):
    """Has "norm" in its name, but its weight is a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(3, 4)), 1e-5


class PreNorm(nn.Module):
    """A wrapper: the parameters belong to the layer within."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.norm = 1e-5, nn.LayerNorm(4)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.LayerNorm(4),
        nn.LayerNorm(4, bias=False),
        nn.LayerNorm((3, 4)),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4, affine=True),
        nn.InstanceNorm2d(4, affine=True),
        nn.InstanceNorm3d(4, affine=True),
        nn.RMSNorm(4),
        LlamaRMSNorm(4),
        Standardize(4),
        type("EpsilonOnly", (Standardize,), {"eps": 1e-3})(4),
    ],
    ids=lambda module: type(module).__name__,
)
def test_norm_means_every_normalization_with_affine_parameters(norm):
    assert sites_of(nn.Sequential(norm, nn.PReLU(4)), "norm") == ["0"]


@pytest.mark.parametrize(
    "other",
    [
        nn.PReLU(4),
        nn.Linear(4, 1),
        nn.Embedding(4, 1),
        nn.Conv1d(1, 1, 1),
        WeightNormedLinear(),
        nn.LocalResponseNorm(2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_norm_does_not_mean_other_layers(other):
    assert sites_of(nn.Sequential(nn.LayerNorm(4), other), "norm") == ["0"]


def test_a_wrapper_around_a_norm_is_not_a_norm_itself():
    assert sites_of(nn.Sequential(PreNorm()), "norm") == ["0.norm"]


@pytest.mark.parametrize(
    "bare",
    [
        nn.BatchNorm2d(4, affine=False),
        nn.LayerNorm(4, elementwise_affine=False),
        nn.GroupNorm(2, 4, affine=False),
        nn.InstanceNorm2d(4),
        nn.RMSNorm(4, elementwise_affine=False),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_norm_without_affine_parameters_is_skipped_and_the_reason_given(bare):
    report = pb.patch_(nn.Sequential(nn.LayerNorm(4), bare), pb.EMP(2), "norm")
    assert report.skipped == {"1": "a norm layer without affine parameters"}
    assert "skipped  1: a norm layer without affine parameters" in str(report)


def test_a_lazy_layer_is_skipped_and_the_remedy_given():
    report = pb.patch_(nn.Sequential(nn.LayerNorm(4), nn.LazyBatchNorm1d()), pb.EMP(2), "norm")
    assert "run a batch through the network first" in report.skipped["1"]
    assert [site.name for site in report.sites] == ["0"]


def test_a_layer_with_a_parametrization_of_another_kind_is_skipped():
    model = nn.Sequential(nn.Linear(3, 3), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    report = pb.patch_(model, pb.EMP(2), "linear")
    assert [site.name for site in report.sites] == ["0"]
    assert "parametrization" in report.skipped["1"]


def test_dropout_skips_a_projection_that_its_attention_never_calls():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    report = pb.patch_(model, pb.Dropout(0.5), "linear")
    assert [site.name for site in report.sites] == ["linear1", "linear2"]
    assert "never calls it" in report.skipped["self_attn.out_proj"]
    weights = pb.patch_(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), pb.ECMP(2), "linear")
    assert "self_attn.out_proj" in [site.name for site in weights.sites]


# ---- output and input


def test_output_and_input_follow_the_order_of_execution_when_it_can_be_traced():
    model = Net()
    report = pb.patch_(model, pb.EMP(2), "output", example_input=X)
    assert [site.name for site in report.sites] == ["first"]
    assert report.notes == ('output is "first" (last in order of execution)',)
    report = pb.patch_(Net(), pb.EMP(2), "input", example_input=X)
    assert [site.name for site in report.sites] == ["last"]
    assert report.notes == ('input is "last" (first in order of execution)',)


def test_output_and_input_follow_the_order_of_registration_otherwise_and_the_report_says_so():
    report = pb.patch_(Net(), pb.EMP(2), "input+output")
    assert [site.name for site in report.sites] == ["first", "last"]
    assert report.notes[0].startswith('input is "first" (first in order of registration; pass example_input')
    assert report.notes[1].startswith('output is "last" (last in order of registration; pass example_input')
    assert all(f"  note     {note}" in str(report) for note in report.notes)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.embedding = nn.Linear(3, 2), nn.Embedding(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.embedding(tokens).mean(1))


def test_an_embedding_can_be_the_input_and_never_the_output():
    tokens = torch.tensor([[0, 1], [2, 3]])
    assert sites_of(Recurrent(), "input", example_input=tokens) == ["embedding"]
    assert sites_of(Recurrent(), "output") == ["fc"]
    assert sites_of(nn.Sequential(nn.LSTM(3, 3)), "input") == ["0"]


def test_a_layer_that_runs_twice_counts_with_its_last_call():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(self.a(x)))

    x = torch.zeros(2, 3)
    assert sites_of(Twice(), "output", example_input=x) == ["a"]
    assert sites_of(Twice(), "input", example_input=x) == ["a"]


def test_tracing_leaves_the_network_as_it_was():
    model = Net().train()
    model.bn.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    pb.patch_(model, pb.Dropout(0.1), "output", example_input=X)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.bn.training
    assert all(torch.equal(before[key], model.state_dict()[key]) for key in before)
    assert not any(module._forward_hooks for module in model.modules())


def test_tracing_a_patched_network_neither_draws_nor_warns(recwarn):
    model = Net().eval()
    pb.patch_(model, pb.EMP(2), "norm")
    generator = model.state_dict()["patchbayes_generator"]
    report = pb.patch_(model, pb.EMP(2), "output", example_input=X)
    assert "first" in [site.name for site in report.sites]
    assert torch.equal(model.state_dict()["patchbayes_generator"], generator)
    assert not recwarn.list


# ---- nothing found


def test_nothing_matched_says_what_is_there_and_what_to_do():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    with pytest.raises(NothingToPatch) as error:
        pb.patch_(model, pb.EMP(2), "norm")
    assert str(error.value) == (
        "patch_ found no site in Sequential (6 modules).\n"
        '  wanted   sites="norm" (BatchNorm, LayerNorm, GroupNorm, InstanceNorm, RMSNorm and look-alikes, '
        "with affine parameters)\n"
        "  present  Conv2d x2, ReLU x1, Flatten x1, Linear x1\n"
        '  do       sites="output" would patch "4"; or pass a predicate (name, module) -> bool.'
    )


def test_nothing_matched_by_a_predicate_and_by_an_empty_network():
    with pytest.raises(NothingToPatch, match="a predicate"):
        pb.patch_(Net(), pb.EMP(2), lambda name, module: False)
    with pytest.raises(NothingToPatch, match="present  ReLU x1"):
        pb.patch_(nn.Sequential(nn.ReLU()), pb.EMP(2))
    with pytest.raises(NothingToPatch, match="1 norm layers without affine parameters"):
        pb.patch_(nn.Sequential(nn.LayerNorm(3, elementwise_affine=False)), pb.EMP(2), "norm")


def test_an_unknown_name_lists_the_names_there_are():
    with pytest.raises(NothingToPatch, match=r'no module named "fc"(.|\n)*"first", "conv", "bn"'):
        pb.patch_(Net(), pb.EMP(2), "norm+fc")


@pytest.mark.parametrize("sites", [3, None, ["norm"], ""])
def test_sites_that_are_no_selection_are_refused(sites):
    with pytest.raises(PatchbayesError):
        pb.patch_(Net(), pb.EMP(2), sites)
