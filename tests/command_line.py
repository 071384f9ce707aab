"""The console command, run inside the test process: what it prints, and its exit code."""

import contextlib
import io
import json
import shlex
import signal
import sys
from dataclasses import dataclass
from unittest import mock

from patchbayes.cli import application


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self):
        """Standard output as strict JSON, which knows no NaN."""
        return strict_json(self.out)


def command(line, *words, code=0):
    """Run `patchbayes LINE WORDS...`, piped; the exit code must be the one expected."""
    words = ["patchbayes", *shlex.split(line), *map(str, words)]
    out, err = io.StringIO(), io.StringIO()
    handler, end = signal.getsignal(signal.SIGPIPE), 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "path", list(sys.path)),
    ):
        try:
            application.run()
        except SystemExit as error:
            end = error.code or 0
        finally:
            signal.signal(signal.SIGPIPE, handler)
    found = Outcome(end, out.getvalue(), err.getvalue())
    assert found.code == code, f"{shlex.join(words)}: {found}"
    return found


def strict_json(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)
