"""Push a model directory to the Hugging Face hub, in one commit."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import wait
from json import JSONDecodeError
from pathlib import Path
from typing import TypeVar

from raytune_fsdp.base.errors import ModelError, RaytuneError, TransientError, in_one_line, setting
from raytune_fsdp.base.threads import in_thread
from raytune_fsdp.model.directory.files import is_hub_name
from raytune_fsdp.model.directory.hub_weights import HUB_SECONDS
from raytune_fsdp.model.directory.known_files import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    is_weights,
    travelling,
)

_ANY_WEIGHTS = (".safetensors", ".safetensors.index.json")
_OF_MODELS = (CONFIG_FILE, GENERATION_CONFIG_FILE)
_LATER = {408, 409, 412, 429}
"""Statuses below 500 that another try may change: too slow, too many requests, or another commit came first."""
_MAX_REASON = 300
"""Characters of the hub's answer that a message shows: the hub may send a whole page."""
_XET_REFUSED = re.compile(r"HTTP status client error \((\d+) ")

T = TypeVar("T")


def check_push(name: str) -> str:
    """Return the token to push `name` with. Refuse what could not be pushed: a bad name, no token.

    Does not ask the hub. Called before training, too, so that a run does not end with a model that nobody gets.
    """
    from huggingface_hub import get_token
    from huggingface_hub.constants import HF_HUB_OFFLINE

    what = f"export.push={name}"
    if not is_hub_name(name):
        raise ModelError(
            f"export.push={' '.join(name.split())}: not a name the hub allows; it must be owner/name or name, of "
            "letters, digits, '-', '_' and '.' (not first or last, not doubled), at most 96 characters"
        )
    if HF_HUB_OFFLINE:
        raise ModelError(f"{what}: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so nothing can be pushed: unset it")
    try:
        token = _soon(get_token)  # an OAuth token may have to be renewed, which asks the hub
    except Exception as error:
        raise ModelError(
            f"{what}: cannot get a token for the hub ({in_one_line(error)}): {setting('HF_TOKEN')}"
        ) from error
    if not token:
        raise ModelError(
            f"{what}: pushing needs a token with write access: {setting('HF_TOKEN')}, or run `hf auth login`"
        )
    if not (token.isascii() and token.isprintable() and " " not in token):
        # The HTTP library would refuse the header with it, and show the token in its message.
        raise ModelError(f"{what}: the token has a character that no token has (a quote? a space?): correct HF_TOKEN")
    return str(token)


def push(directory: Path, name: str, *, private: bool, message: str) -> str:
    """Push the export in `directory` to the model `name` on the hub and return the URL of the commit; network.

    The mark of the export is not pushed, nor is anything else that lies in the directory.

    A repository that does not exist is created: private if asked, else with the default of its owner's account. An
    existing repository keeps its visibility and its files, except what an earlier push left of another model: weights,
    which a loader finds by their names, and the config of an adapter where a whole model is now, or of a model where an
    adapter is, by which a loader decides which of the two it loads.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    token = check_push(name)
    if not directory.is_dir():
        raise ModelError(f"export.push={name}: {directory} is not a directory, so there is no model to push")
    weights = [path.name for path in sorted(directory.iterdir()) if is_weights(path.name) and not path.is_symlink()]
    adapter = [ADAPTER_CONFIG_FILE] if (directory / ADAPTER_CONFIG_FILE).is_file() else []
    files = {file: directory / file for file in [*travelling(directory, code=True), *adapter, *weights]}
    api = HfApi(token=token)
    try:
        # First, with a short deadline: can the hub be reached? The answer also supplies the owner that a name may lack.
        user = _soon(api.whoami)["name"]
        repository = name if "/" in name else f"{user}/{name}"
        api.create_repo(repository, private=private or None, exist_ok=True)
        # Not upload_folder: with hf_xet it may split a push that is large or slow, or needs retries, into several
        # commits.
        # An earlier push put its weights at the top. Weights in a subdirectory are somebody else's.
        top = [name for name in api.list_repo_files(repository) if "/" not in name]
        others = _OF_MODELS if adapter else (ADAPTER_CONFIG_FILE,)
        gone = [name for name in top if (name.endswith(_ANY_WEIGHTS) or name in others) and name not in files]
        operations = [
            *(CommitOperationDelete(path_in_repo=name) for name in gone),
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()),
        ]
        commit = api.create_commit(repository, operations, commit_message=message)
    except Exception as error:  # which HTTP library raises it depends on the version of huggingface_hub
        raise _as_line(error, name, directory, token) from error
    return str(commit.commit_url)


def _soon(call: Callable[[], T]) -> T:
    """Call with a deadline of HUB_SECONDS. After it the calling thread is abandoned, and TimeoutError is raised.

    Without it, a name server, a proxy or a hub that accepts connections and then does not answer would hang forever.
    """
    answer = in_thread(call, "hub")
    if not wait([answer], timeout=HUB_SECONDS).done:
        raise TimeoutError(f"no answer within {HUB_SECONDS} s")
    return answer.result()


def _as_line(error: Exception, name: str, directory: Path, token: str) -> RaytuneError:
    """Turn the error into one line that says what to do about it. TransientError: another try may succeed."""
    what = f"export.push={name}"
    status, reason = _status_and_reason(error)
    # A library may quote the request, and with it the token.
    reason = " ".join(reason.split()).replace(token, "<token>")[:_MAX_REASON]
    if status == 401:
        return ModelError(f"{what}: the hub does not know the token ({reason}): set HF_TOKEN to a valid one")
    if status == 403:
        return ModelError(
            f"{what}: the token may not write there ({reason}): use a name of your own or of an organization you may "
            "write to, and a token with write access"
        )
    if 400 <= status < 500 and status not in _LATER:
        return ModelError(f"{what}: the hub refuses ({reason}): check the name, and what your account may store")
    # The library's own check of the files raises ValueError. JSONDecodeError is a ValueError too, but means that the
    # answer was not the hub's.
    if isinstance(error, ValueError) and not isinstance(error, JSONDecodeError):
        return ModelError(f"{what}: the hub does not accept the files in {directory} ({reason}): change them")
    if isinstance(error, OSError) and error.filename is not None:
        return ModelError(f"{what}: {directory} cannot be read ({reason}): check its permissions, or export again")
    failed = "the hub fails" if status else "the hub cannot be reached"
    return TransientError(f"{what}: {failed} ({reason}); the model is in {directory}: push it again later")


def _status_and_reason(error: Exception) -> tuple[int, str]:
    """Return the status of the hub's answer, and the reason in words. The status is 0 if there was no answer."""
    from huggingface_hub.errors import HfHubHTTPError

    # For a large file the library only says which one could not be stored; the reason is in the cause. The text of a
    # storage's answer contains its URL, so only the message inside is shown.
    stored = error.__cause__ if isinstance(error, RuntimeError) else None
    cause = stored if isinstance(stored, Exception) else error
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        reason = f"HTTP {status}: {cause.server_message or cause.response.reason_phrase}"
        # A storage's 403 means that its URL has expired, not that the token is too weak: another try gets a new URL.
        return (status if cause is error else 500), reason
    # hf_xet raises one kind of error for everything; the status is only in its text.
    refused = _XET_REFUSED.search(str(cause))
    return (int(refused[1]) if refused else 0), f"{type(cause).__name__}: {cause}"
