"""Language models: tokens, sequences, generated text; a tiny GPT-2 and a tiny Llama trained on real text."""

import pytest
import torch

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from third_party import TOKENS, clinc150, gpt2, llama

transformers = pytest.importorskip("transformers")
from patchbayes.integrations.transformers import BayesTrainer, generate, per_sequence  # noqa: E402

PROMPT = TOKENS[:2]


def patched(make=gpt2, jitter=1.5, sites="norm"):
    model = make()
    pb.patch_(model, pb.EMP(3, jitter=jitter), sites)
    return model


@pytest.mark.parametrize("make", [gpt2, llama])
class TestGenerate:
    def test_one_draw_writes_a_whole_sequence(self, make):
        model = patched(make)
        draws = pb.Draws.stratified(model, 3)
        written = generate(model, PROMPT, draws=draws, max_new_tokens=5, do_sample=False)
        assert written.shape == (3, 2, PROMPT.shape[1] + 5)
        for number in range(3):
            tokens = PROMPT
            for _ in range(5):  # without a cache, the same draw at every token
                with pb.use_draw(model, draws[number]), torch.no_grad():
                    tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
            assert torch.equal(written[number], tokens)
        assert len(written[:, 0].unique(dim=0)) > 1

    def test_every_token_comes_from_the_average(self, make):
        model = patched(make)
        draws = pb.Draws.stratified(model, 3)
        written = generate(model, PROMPT, how="average", draws=draws, max_new_tokens=5, do_sample=False)
        tokens = PROMPT
        for _ in range(5):
            averaged = pb.predict(model, {"input_ids": tokens}, draws, engine="loop").log_probs
            tokens = torch.cat([tokens, averaged[:, -1:].argmax(-1)], 1)
        assert torch.equal(written, tokens)
        assert torch.equal(
            generate(model, PROMPT, how="average", draws=draws, max_new_tokens=5, do_sample=False, use_cache=False),
            tokens,
        )

    def test_the_model_is_as_it_was(self, make):
        model = patched(make).train()
        own = type(model)
        generate(model, {"input_ids": PROMPT}, how="average", draws=2, max_new_tokens=2, do_sample=False)
        generate(model, PROMPT, draws=2, max_new_tokens=2, generator=torch.Generator().manual_seed(3), do_sample=False)
        assert model.training
        assert type(model) is own
        mean = model.eval().generate(PROMPT, max_new_tokens=3, do_sample=False)  # its own: the mean network, one answer
        assert torch.equal(mean, model.generate(PROMPT, max_new_tokens=3, do_sample=False))


def test_what_generate_cannot_do_is_refused():
    with pytest.raises(PatchbayesError, match="expected one beam"):
        generate(patched(), PROMPT, how="average", draws=2, num_beams=2, max_new_tokens=2)
    with pytest.raises(PatchbayesError, match='expected "draw" or "average"'):
        generate(patched(), PROMPT, how="both")


def test_uncertainty_per_token_and_sequence():
    model = patched()
    labels = TOKENS.clone()
    labels[:, 4:] = -100
    labels[1] = -100
    draws = pb.Draws.stratified(model, 4)
    prediction = pb.predict(model, {"input_ids": TOKENS, "labels": labels}, draws, engine="loop")
    each = torch.stack([_log_probs(model, draws[number]) for number in range(4)])  # (S, B, T, V)
    mean = each.logsumexp(0) - torch.tensor(4.0).log()
    entropy, expected = -(mean.exp() * mean).sum(-1), -(each.exp() * each).sum(-1).mean(0)
    torch.testing.assert_close(prediction.entropy, entropy, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(prediction.mutual_information, entropy - expected, atol=1e-4, rtol=1e-3)
    found = per_sequence(prediction, labels, model)
    assert found["tokens"].tolist() == [3, 0, 3, 3]  # labels 1 to 3, told by positions 0 to 2
    torch.testing.assert_close(found["entropy"][0], entropy[0, :3].mean(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found["mutual_information"][2], (entropy - expected)[2, :3].mean(), atol=1e-4, rtol=1e-3)
    nll = -mean[3, :3].gather(-1, labels[3, 1:4, None]).mean()
    torch.testing.assert_close(found["nll"][3], nll, atol=1e-4, rtol=1e-4)
    assert not found["nll"][1]


def test_labels_that_do_not_count_are_left_out_of_the_loss():
    model = patched(jitter=0.0)
    labels = TOKENS.clone()
    labels[:, :5] = -100
    predictor = pb.Predictor(model, 2, returns="model_output", engine="loop")
    with torch.no_grad():
        expected = model(input_ids=TOKENS, labels=labels).loss
    torch.testing.assert_close(predictor(input_ids=TOKENS, labels=labels).loss, expected)


def _log_probs(model, draw):
    with pb.use_draw(model, draw), torch.no_grad():
        return torch.log_softmax(model(TOKENS).logits, -1)


class Letters(torch.utils.data.Dataset):
    """Requests of people as sequences of letters."""

    def __init__(self, texts, length=32):
        self.rows = [torch.tensor([min(ord(c), 127) for c in text[:length].ljust(length)]) for text in texts]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_tiny_model_learns_real_text(tmp_path, make):
    texts = clinc150()
    model = make(vocabulary=128, width=32)
    pb.patch_(model, pb.ECMP(3, jitter=0.1), "norm")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=150, per_device_train_batch_size=16, learning_rate=5e-3, report_to=[],
        disable_tqdm=True, use_cpu=True, save_strategy="no",
    )  # fmt: skip
    held_out = Letters(texts[1::50][:32])
    trainer = BayesTrainer(
        model, arguments, train_dataset=Letters(texts[::5]), eval_dataset=held_out, draws=4, num_data=len(texts)
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.65 * before
    tokens = torch.stack(held_out.rows)
    order = torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(0))
    scores = {}
    for name, rows in {"text": tokens, "shuffled": tokens[:, order]}.items():
        prediction = pb.predict(model, {"input_ids": rows}, 4, engine="loop")
        scores[name] = per_sequence(prediction, rows, model)
    assert scores["text"]["nll"].mean() < scores["shuffled"]["nll"].mean()
    assert (scores["text"]["mutual_information"] >= 0).all()
    assert scores["text"]["nll"].mean() == pytest.approx(after, rel=0.02)
    written = generate(model, tokens[:2, :8], how="average", draws=4, max_new_tokens=12, do_sample=False)
    assert written.shape == (2, 20)
