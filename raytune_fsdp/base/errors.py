"""What can go wrong, for people.

    RaytuneError            exit code 1
    ├── UserError           exit code 2: the request cannot be met; nothing was started, only caches were written
    │   ├── ConfigError     a field, a flag or a combination of them
    │   ├── DataError       a dataset, a row, a tokenizer
    │   │   ├── DamagedError  a file that was whole when the run started
    │   │   └── RowError    one row that cannot be used; data.bad_rows=skip leaves it out
    │   ├── ModelError      a model path, a checkpoint of weights, an architecture
    │   └── ResumeError     a run directory or checkpoint that cannot be continued as asked
    ├── TrainingError       exit code 1: training itself failed
    │   ├── TransientError  something around it failed; a new attempt may succeed
    │   └── RepeatedError   exit code 3: it failed again and again at the same place; a new attempt would, too
    ├── HandedOver          an attempt has ended for another one of the same command, which goes on from there
    └── Interrupted         exit code 130: stopped from outside, can be continued

Every message names the field (or file), the value, the rule, and the way out.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution


class RaytuneError(Exception):
    """Base of everything this package raises on purpose. Each of its arguments is one problem, on one line."""

    exit_code = 1

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class UserError(RaytuneError):
    """The request is wrong: found before anything was started, and before anything but caches was written."""

    exit_code = 2


class ConfigError(UserError):
    """A field, a flag or a combination of them."""


class DataError(UserError):
    """A dataset, a row or a tokenizer."""


class DamagedError(DataError):
    """What was whole when the run started is not any more, or never was what it says. No row is to blame."""


class RowError(DataError):
    """One row that cannot be used; `data.bad_rows=skip` leaves it out and counts it under `reason`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[RowError], tuple[str, str]]:
        return RowError, (str(self), self.reason)


class ModelError(UserError):
    """A model path, a checkpoint of weights or an architecture."""


class ResumeError(UserError):
    """A run directory or checkpoint that cannot be continued as asked."""


class OtherRunError(ResumeError):
    """The existing run was trained with other settings, or on other data, than those that would continue it."""


class TrainingError(RaytuneError):
    """Training started and failed."""


class TransientError(TrainingError):
    """Storage, or the delivery of data to a rank, failed: a new attempt from the last checkpoint may succeed."""


class OccupiedError(TransientError):
    """Other processes hold memory of a GPU that the run needs: they may be gone before the next attempt."""


class RepeatedError(TrainingError):
    """Three attempts in a row have failed in the same way at the same step, from within."""

    exit_code = 3


class HandedOver(RaytuneError):
    """An attempt has ended in good order; another one goes on from its checkpoint."""


class Interrupted(RaytuneError):
    """Stopped from outside; the same command continues."""

    exit_code = 130


_EXTRAS = {
    "lora": "peft", "mlflow": "mlflow", "plots": "matplotlib", "large": "accelerate", "fp8": "torchao",
    "lm-eval": "lm_eval accelerate", "optuna": "optuna",
}  # fmt: skip


JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray's variable with the config of a job, in the job alone. It is really called so."""


def setting(variable: str) -> str:
    """Return the words for how a user sets an environment variable for this process."""
    where = " in the environment of `ray start`, which a job has instead of yours"
    return f"set {variable}{where if JOB_CONFIG in os.environ else ''}"


def pip_install(extra: str) -> str:
    """Return the command that installs what an extra of this package brings."""
    try:
        distribution("raytune-fsdp")
    except PackageNotFoundError:  # run from its source, as in a Ray job: there is no extra to name
        return f"pip install {_EXTRAS[extra]}"
    return f"pip install 'raytune-fsdp[{extra}]'"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind if it has none; for where the kind adds nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def in_one_line(error: BaseException) -> str:
    """Return an error as one line, to be part of another message.

    Only the message where that says everything, as ours and the operating system's do; otherwise the kind and the
    first line: `KeyError: 'weight_map'`, not `'weight_map'`.
    """
    if isinstance(error, RaytuneError):
        return " ".join(str(error).split())
    kind, line = type(error).__name__, first_line(error)[:500]  # some libraries quote a whole answer of a server
    return line if line == kind or (isinstance(error, OSError) and error.strerror) else f"{kind}: {line}"


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust has panicked.

    A panic is not an Exception; nor are signals and exits, which must not be caught.
    """
    return type(error).__name__ == "PanicException"
