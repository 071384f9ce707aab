"""The Trainer and the pipelines of transformers with patched networks."""

import pytest
import torch
from torch import nn

import patchbayes as pb
from patchbayes.errors import PatchbayesError
from third_party import LABELS, TOKENS, Requests, bert, gpt2, lora

transformers = pytest.importorskip("transformers")
from patchbayes.integrations.transformers import BayesTrainer, BayesTrainerMixin  # noqa: E402

INPUTS = {"input_ids": TOKENS, "labels": LABELS}


def patched(make=bert, jitter=0.3, sites="norm+output"):
    model = make()
    pb.patch_(model, pb.EMP(3, jitter=jitter), sites)
    return model


def arguments(folder, steps=4, **options):
    options = {"per_device_train_batch_size": 8, "learning_rate": 1e-3, "save_strategy": "no"} | options
    return transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, report_to=[], disable_tqdm=True, use_cpu=True, **options
    )


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


class TestPredictor:
    def test_it_answers_like_a_model(self):
        model = patched()
        predictor = pb.Predictor(model, 4, returns="model_output", engine="loop")
        output = predictor(**INPUTS)
        prediction = pb.predict(model, {"input_ids": TOKENS}, 4, engine="loop")
        assert isinstance(output, transformers.modeling_outputs.SequenceClassifierOutput)
        torch.testing.assert_close(output.logits, prediction.log_probs)
        torch.testing.assert_close(output.loss, nn.functional.nll_loss(prediction.log_probs, LABELS))
        assert predictor(input_ids=TOKENS).loss is None
        assert predictor.config is model.config
        assert predictor.device == model.device
        torch.testing.assert_close(predictor.predict(input_ids=TOKENS).probs, prediction.probs)

    def test_only_a_predictor_of_model_outputs_stands_in_for_the_model(self):
        plain = pb.Predictor(patched(), 4)
        assert isinstance(plain(input_ids=TOKENS), torch.Tensor)
        with pytest.raises(AttributeError, match="config"):
            plain.config  # noqa: B018
        with pytest.raises(PatchbayesError, match='expected "tensor" or "model_output"'):
            pb.Predictor(patched(), 4, returns="logits")

    def test_a_trainer_evaluates_it(self, tmp_path):
        predictor = pb.Predictor(patched(), 4, returns="model_output", engine="loop")
        trainer = transformers.Trainer(predictor, arguments(tmp_path), eval_dataset=Requests(12))
        averaged = pb.predict(predictor.model, {"input_ids": Requests(12).tokens}, 4, engine="loop")
        expected = nn.functional.nll_loss(averaged.log_probs, Requests(12).labels)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), abs=1e-5)

    def test_a_pipeline_runs_it(self):
        tokenizers = pytest.importorskip("tokenizers")
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "[PAD]": 1, "a": 2, "b": 3}, "[UNK]"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")
        predictor = pb.Predictor(patched(), 4, returns="model_output", engine="loop")
        pipeline = transformers.pipeline("text-classification", model=predictor, tokenizer=tokenizer)
        expected = pb.predict(predictor.model, {"input_ids": torch.tensor([[2, 3, 2]])}, 4, engine="loop")
        assert pipeline("a b a")[0]["score"] == pytest.approx(float(expected.confidence), abs=1e-5)


class TestLabelsInBatches:
    def test_predict_leaves_labels_out(self):
        model = patched()
        alone = pb.predict(model, {"input_ids": TOKENS}, 4, engine="loop")
        torch.testing.assert_close(pb.predict(model, INPUTS, 4, engine="loop").probs, alone.probs)
        torch.testing.assert_close(pb.predict(model, [INPUTS], 4, engine="loop").probs, alone.probs)

    def test_what_a_network_asks_for_stays(self):
        class Conditional(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 3)

            def forward(self, x, y=None):
                return self.layer(x if y is None else x + y)

        model = Conditional()
        pb.patch_(model, pb.EMP(2, jitter=0.5), "output")
        x, y = torch.ones(2, 2), torch.full((2, 2), 5.0)
        assert not torch.equal(pb.predict(model, {"x": x, "y": y}).probs, pb.predict(model, {"x": x}).probs)

    def test_calibrating_reads_them(self):
        data = Requests(40)
        report = pb.calibrate_(patched(), [{"input_ids": data.tokens, "labels": data.labels}], draws=3, budget=200)
        assert report.num_held_out == 40

    def test_a_causal_model_is_calibrated_on_the_next_token(self):
        model = gpt2()
        tokens = torch.randint(1, 100, (24, 9), generator=torch.Generator().manual_seed(3))
        labels = tokens.clone()
        labels[:, :4] = -100
        report = pb.calibrate_(model, [{"input_ids": tokens, "labels": labels}], draws=2, budget=100)
        with torch.no_grad():
            expected = model(input_ids=tokens, labels=labels).loss
        assert report.before.nll == pytest.approx(float(expected), rel=1e-3)  # per token that counts


class TestBayesTrainer:
    def test_the_kl_counts_once_in_a_step_whatever_is_accumulated(self, tmp_path):
        def gradient(size, accumulated, weight):
            model = patched()
            seen = {}
            options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
            trainer = BayesTrainer(
                model, arguments(tmp_path, 1, max_grad_norm=0.0, learning_rate=0.0, **options),
                train_dataset=Requests(8), kl_weight=weight, sharing=0.0,
            )  # fmt: skip

            class Watch(transformers.TrainerCallback):
                def on_pre_optimizer_step(self, *_, **__):
                    seen.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

            trainer.add_callback(Watch())
            trainer.train()
            return seen

        name = "classifier.patchbayes.components.weight"
        reference = patched()
        pb.kl(reference, shared=False).backward()
        expected = dict(reference.named_parameters())[name].grad / 8
        for size, accumulated in ((8, 1), (2, 4)):
            added = gradient(size, accumulated, 1.0)[name] - gradient(size, accumulated, 0.0)[name]
            torch.testing.assert_close(added, expected, rtol=1e-3, atol=1e-6)

    def test_evaluation_averages_draws(self, tmp_path):
        seen = {}

        def metrics(result):
            seen["logits"] = torch.as_tensor(result.predictions)
            return {"right": float((seen["logits"].argmax(-1) == torch.as_tensor(result.label_ids)).float().mean())}

        model, data = patched(), Requests(12)
        trainer = BayesTrainer(model, arguments(tmp_path), eval_dataset=data, draws=4, compute_metrics=metrics)
        found = trainer.evaluate()
        expected = pb.predict(model, {"input_ids": data.tokens}, 4, engine="loop")
        torch.testing.assert_close(seen["logits"], expected.log_probs, atol=1e-5, rtol=1e-5)
        nll = float(nn.functional.nll_loss(expected.log_probs, data.labels))
        assert found["eval_loss"] == pytest.approx(nll, abs=1e-5)
        assert found["eval_right"] == pytest.approx(float((expected.predicted_class == data.labels).float().mean()))

    @pytest.mark.slow
    @pytest.mark.parametrize("trainer", [BayesTrainer, transformers.Trainer])
    def test_resuming_gives_the_same_bits_and_the_checkpoint_loads(self, tmp_path, trainer):
        options = {"save_strategy": "steps", "save_steps": 2}
        whole, data = patched(), Requests(32)
        trainer(whole, arguments(tmp_path, **options), train_dataset=data).train()
        resumed = patched()
        again = trainer(resumed, arguments(tmp_path, **options), train_dataset=data)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert equal(whole, resumed)
        last = tmp_path / "checkpoint-4"
        ordinary = type(bert()).from_pretrained(last).eval()
        torch.testing.assert_close(ordinary(TOKENS).logits, whole.eval()(TOKENS).logits)
        loaded = pb.from_pretrained(type(bert()), last)
        assert equal(whole, loaded)

    @pytest.mark.slow
    def test_adapters_are_resumed_with_their_components(self, tmp_path):
        options = {"save_strategy": "steps", "save_steps": 2}

        def run(model, folder=None):
            data = Requests(32)
            BayesTrainer(model, arguments(tmp_path, **options), train_dataset=data).train(resume_from_checkpoint=folder)

        whole, resumed = (patched(lora, sites="trainable") for _ in range(2))
        run(whole)
        run(resumed, str(tmp_path / "checkpoint-2"))
        assert equal(whole, resumed)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "options", [{"bf16": True}, {"gradient_checkpointing": True}, {"label_smoothing_factor": 0.1}]
    )
    def test_it_trains_as_the_trainer_does(self, tmp_path, options):
        model, data = patched(jitter=0.1), Requests(64)
        trainer = BayesTrainer(
            model, arguments(tmp_path, 60, learning_rate=5e-3, **options), train_dataset=data, eval_dataset=data,
            kl_weight=0.0, draws=3,
        )  # fmt: skip
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        assert trainer.evaluate()["eval_loss"] < 0.8 * before

    @pytest.mark.slow
    def test_the_best_model_at_the_end_is_patched(self, tmp_path):
        model = patched()
        options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        trainer = BayesTrainer(
            model, arguments(tmp_path, load_best_model_at_end=True, **options), train_dataset=Requests(32),
            eval_dataset=Requests(12, seed=2), draws=3,
        )  # fmt: skip
        trainer.train()
        best = pb.from_pretrained(type(bert()), trainer.state.best_model_checkpoint)
        assert equal(model, best)

    def test_what_cannot_learn_is_refused(self, tmp_path):
        with pytest.raises(PatchbayesError, match="the model is not patched"):
            BayesTrainer(bert(), arguments(tmp_path))
        frozen = bert().requires_grad_(False)
        pb.patch_(frozen, pb.EMP(3), "norm")
        with pytest.raises(PatchbayesError, match="all 5 patched layers are frozen"):
            BayesTrainer(frozen, arguments(tmp_path))

    def test_patches_are_not_decayed(self, tmp_path):
        model = patched()
        trainer = BayesTrainer(model, arguments(tmp_path, weight_decay=0.1), train_dataset=Requests(8))
        decayed = trainer.get_decay_parameter_names(model)
        assert any("query.weight" in name for name in decayed)
        assert not any("patchbayes" in name for name in decayed)

    def test_the_mixin_goes_with_other_trainers(self, tmp_path):
        class Mine(BayesTrainerMixin, transformers.Seq2SeqTrainer):
            pass

        options = transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path), max_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no"
        )
        model = patched()
        before = pb.patched_sites(model)["classifier"].components("weight").clone()
        Mine(model, options, train_dataset=Requests(8), num_data=100).train()
        assert not torch.equal(before, pb.patched_sites(model)["classifier"].components("weight"))
