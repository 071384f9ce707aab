"""Command lines that somebody mistyped, or that were made to harm: each ends with an exit code and a sentence."""

import contextlib
import io
import shlex
import shutil
import signal
import sys
from unittest import mock

import pytest
from attacking import CANARY, attack, survives
from mutations import word

from command_line import command
from patchbayes.cli import application
from patchbayes.errors import PatchbayesError
from patchbayes.runs import TrainingConfig, train
from small_runs import write_npz

SHORT = 60
LINES = (
    "train new --data npz:d.npz --model mlp:4 --epochs 1 --batch-size 16",
    "train new --data csv:t.csv#y --model mlp:4 --epochs 1 --column a:number",
    "train new --config net/config.json --set epochs=1",
    "train net --resume --quiet",
    "evaluate net --draws 3 --split test",
    "predict net t.csv --draws 3 --format jsonl",
    "predict net t.csv --risk 0.2 --risk-on test[:6]",
    "report net -o page.html --format markdown",
    "bayesianize plain/best.safetensors new --model mlp:4 --data npz:d.npz --held-out test --sites output --budget 200",
    "params mlp:4 --outputs 3 --input 4 -K 2 --sites all",
    "reproduce --list",
)
WORDS = (
    "--help", "--version", "--debug", "--json", "--draws", "--epochs", "--seed", "--lr", "--method", "--sites", "--set",
    "--config", "--trust-code=0", "-1", "0", "1e999", "nan", "inf", str(2**70), "10" * 12, "emp(", "emp(0)", "ecmp(10**9)",
    "emp(5, jitter=nan)", "threads=0", "data=3", "=", "epochs=[]", "\x1b[2J", "\x00", "/dev/zero", "/dev/null", "net", "..",
    "net/last.safetensors", "a" * 5000, CANARY, "norm+nothing", "test[", "test[5:1]", "train", "--", "-", "-o", "", "*", "~",
    "%s", "é",
)  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    write_npz(tmp_path / "d.npz")
    (tmp_path / "t.csv").write_text(
        "x0,x1,x2,x3,a,y\n" + "".join(f"{i},1,2.5,{-i},3,{['no', 'yes'][i % 2]}\n" for i in range(20))
    )
    for name, method in (("net", "emp(2)"), ("plain", "vanilla")):
        config = TrainingConfig(data=f"npz:{tmp_path / 'd.npz'}", model="mlp:4", method=method, epochs=1, batch_size=16)
        train(config, tmp_path / name, quiet=True)
    (tmp_path / f"{CANARY}.py").write_text("def run(*_): raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def case(rng):
    words = shlex.split(rng.choice(LINES))
    for _ in range(rng.choice((1, 1, 2, 3))):
        position = rng.randrange(len(words))
        match rng.randrange(5):
            case 0:
                del words[position]
            case 1:
                words.insert(position, rng.choice(WORDS))
            case 2:
                words[position] = rng.choice((*WORDS, word(rng)))
            case 3:
                other = rng.randrange(len(words))
                words[position], words[other] = words[other], words[position]
            case _:
                text = words[position]
                cut = rng.randrange(len(text) + 1)
                words[position] = (
                    text[:cut] + rng.choice(("", "x", "0", "-", "=", ",", "\x1b")) + text[cut + rng.choice((0, 1)) :]
                )
        if not words:
            break
    words = [text.replace("\x00", "") for text in words]  # the system would not hand it over
    # Code that the command line itself names is run, and experiments take long, though nothing is wrong with either.
    names_code = any(CANARY in text or "os:" in text for text in words)
    if names_code or "demo" in words or ("reproduce" in words and "--list" not in words):
        words = ["params", "mlp:4", "--outputs", rng.choice(WORDS).replace("\x00", "")]
    return words


def prepare(rng):
    words = case(rng)
    shutil.rmtree("new", ignore_errors=True)  # what an accepted case made

    def run():
        out, err = io.StringIO(), io.StringIO()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM)}
        try:
            with (
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
                mock.patch.object(sys, "argv", ["patchbayes", *words]),
                mock.patch.object(sys, "path", list(sys.path)),
            ):
                application.run()
        except SystemExit as error:
            told = err.getvalue()
            assert "Traceback" not in told, (words, told)
            assert "--debug ... shows where" not in told, (words, told)  # so it says of errors that are not ours
            assert "\x1b" not in out.getvalue(), words
            if error.code not in (0, None):
                raise PatchbayesError(told or f"nothing was said: {words}") from None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    return run


@pytest.mark.parametrize("line", LINES)
def test_every_line_is_in_order_before_it_is_damaged(place, line):
    """Or the attack would attack nothing: damage to a line that is refused anyway proves little."""
    if line.startswith("report"):
        command("evaluate net --draws 3")
    command(line)


@pytest.mark.filterwarnings("ignore")
class TestCommandLines:
    def test_a_few(self, place, capsys):
        survives(attack("command lines", SHORT, prepare, seconds=60), capsys, refused=0.3)

    @pytest.mark.slow
    def test_many(self, place, capsys):
        survives(attack("command lines", 500, prepare, seed=1, seconds=60), capsys, refused=0.3, accepted=0.01)
