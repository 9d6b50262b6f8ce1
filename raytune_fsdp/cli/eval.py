"""`raytune-fsdp eval`: measure any model as a run's evaluation measures its own, in one process or several."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytune_fsdp.base.errors import RaytuneError
from raytune_fsdp.base.untrusted import printable
from raytune_fsdp.base.urls import is_url
from raytune_fsdp.cli import eval_harness
from raytune_fsdp.cli.common import BASE, RUNS_CODE, TRUST, ConfigParser, add_trust, main_of
from raytune_fsdp.cli.progress import show_progress
from raytune_fsdp.plan.run_dir import CONFIG_FILE, EVENTS_FILE, check_links
from raytune_fsdp.record.console import event_in_words
from raytune_fsdp.record.names import ANSWERED, with_perplexity

if TYPE_CHECKING:
    from raytune_fsdp.checkpoint.state import RunState
    from raytune_fsdp.config import FinetuneConfig


def parser_of(prog: str) -> ConfigParser:
    parser = ConfigParser(
        prog,
        "Measure a model on the datasets of data.eval and the questions of eval.tasks, and let it answer eval.prompts; "
        "without --config, on those of the run that it belongs to.",
    )
    parser.add_argument("model", type=Path, help="run directory, checkpoint, export, or Hugging Face model directory")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N",
        help="ranks on this machine, which share the work and have a whole copy of the model each (default: 1)",
    )  # fmt: skip
    eval_harness.add_flags(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the numbers alone as one line of JSON; null is for what is not finite",
    )
    add_trust(parser, base=BASE, code=f"{TRUST}; and {RUNS_CODE}")
    return parser


def _eval(parser: ConfigParser, arguments: list[str]) -> int:
    flags = {word.partition("=")[0] for word in arguments}
    harness = eval_harness.FLAG in flags
    run = None
    if (model := parser.first_word(arguments, "MODEL")) is not None:
        # The run's own directory, its export's or that of a checkpoint. Many programs have a config.yaml; only a run
        # also has an events file next to it.
        place = Path(model).resolve()
        near = (place, *list(place.parents)[:2])
        run = next((each for each in near if (each / CONFIG_FILE).is_file() and (each / EVENTS_FILE).is_file()), None)
        if run is not None:
            check_links(run)
        parser.default_config = None if run is None else run / CONFIG_FILE
        if run is None and not harness and "--config" not in flags:
            if not is_url(model) and not Path(model).exists():
                parser.error(f"{model} does not exist: name a run, an export, or a Hugging Face model directory")
            parser.error(f"{model} belongs to no run: name the data with --config FILE")
    if harness:
        found, rest = parser.parse_known_args(arguments)
        _print(eval_harness.measure(found, eval_harness.tasks_of(parser, found, rest)), as_json=found.json)
        return 0
    found, config = parser.parse_with_config(arguments)
    eval_harness.check_without(parser, found)
    parser.check_least(found, "--workers")
    from raytune_fsdp.run.places import check_places

    if found.config is None and run is not None:  # the config of the run, which may be a stranger's
        from raytune_fsdp.tools.audit.past import check_code, past_place, placed

        check_code(config, trusted=found.trust_remote_code)
        check_places(run, trusted=found.trust_places, config=config, base=found.base)
        config = placed(config, past_place(run))  # its cache is next to the run, wherever that is now
    check_places(found.model, trusted=found.trust_places, base=found.base)
    if not (config.data.eval or config.eval.tasks or config.eval.prompts):
        parser.error(
            "data.eval names no dataset: set data.eval.0.path to a file of rows, or data.eval.fraction; or ask "
            "questions (eval.tasks, eval.prompts)"
        )
    # Programs get numbers only.
    prompts = [] if found.json else config.eval.prompts
    config = config.with_sections(eval={"prompts": prompts})
    own = None if found.config is not None or parser.default_config is None else Path(parser.default_config)
    measured, answered = _measure(found, config, own)
    _print(with_perplexity(measured), as_json=found.json)
    for fields in answered:
        print(printable(event_in_words(ANSWERED, fields), keep="\n\t"))
    return 0


def _print(values: Mapping[str, float], *, as_json: bool) -> None:
    if as_json:  # which has no numbers for what is not finite
        print(json.dumps({key: value if math.isfinite(value) else None for key, value in values.items()}))
        return
    for key, value in values.items():
        print(printable(f"{key} {value:.6g}"))


_NO_OTHER_ROWS = ("cache", "bad_rows", "max_row_bytes", "seq_len", "packing", "long_documents", "window")
"""Fields of `data` that change neither which rows are held out nor which files are read."""


def _state_of_run(own: Path | None) -> RunState:
    """Return the state of the run; a new run's, if it has no checkpoint."""
    from raytune_fsdp.checkpoint.state import RunState
    from raytune_fsdp.run.resume import find_resume
    from raytune_fsdp.tools.audit.past import past_place

    with suppress(RaytuneError):
        if own is not None:
            return find_resume(past_place(own.parent), resume="auto").state
    return RunState()


def _has_its_rows(config: FinetuneConfig, own: Path | None) -> bool:
    """Return whether rows are read in the order of the run, because they are its own."""
    from raytune_fsdp.config.load import load_config

    with suppress(RaytuneError):
        if own is not None:
            before = load_config(own)
            kept = {name: getattr(before.data, name) for name in _NO_OTHER_ROWS}
            return (before.data, before.eval.tasks) == (config.data.model_copy(update=kept), config.eval.tasks)
    return False


def _measure(
    found: Namespace, config: FinetuneConfig, own: Path | None
) -> tuple[Mapping[str, float], list[dict[str, Any]]]:
    """Return the values of an evaluation, its questions and answers. `own`: the run's config file, if it is used.

    Everything that can be wrong with the data is found before the model is loaded.
    """
    from raytune_fsdp.launch.quiet import quiet

    quiet()
    from raytune_fsdp.checkpoint.state import RunState
    from raytune_fsdp.data.census import census
    from raytune_fsdp.data.mixture import Order
    from raytune_fsdp.data.open import open_evals
    from raytune_fsdp.data.questions import check_names, open_tasks
    from raytune_fsdp.data.reference import given_of
    from raytune_fsdp.launch.examine import StoredModel, check_workers, examine, examine_on_ranks
    from raytune_fsdp.launch.local import check_gpus
    from raytune_fsdp.launch.worker import choose_device
    from raytune_fsdp.model.attention.choose import positions_of
    from raytune_fsdp.run.beginning import orders_of
    from raytune_fsdp.run.evaluation.answers import check_prompts
    from raytune_fsdp.run.evaluation.evaluation import Evaluation
    from raytune_fsdp.run.network_checks import check_positions

    check_gpus(config)
    check_workers(config, found.workers)
    stored = StoredModel(path=found.model, trust_remote_code=found.trust_remote_code, base=found.base)
    hf_config, tokenizer = stored.described(config)
    check_positions(config, hf_config)
    vocabulary, positions = hf_config.get_text_config().vocab_size, positions_of(hf_config)
    check_prompts(config, tokenizer, positions)
    state = _state_of_run(own)
    orders = orders_of(state if _has_its_rows(config, own) else RunState())
    rules = Order.of(**orders).rules
    with show_progress() as progress:
        evals = open_evals(config, tokenizer, vocabulary, progress, **orders)
        tasks = open_tasks(config, tokenizer, vocabulary, positions=positions, progress=progress, order=rules)
        check_names(tasks, evals)
        for windows in evals.values():
            census(windows, progress=progress)  # as in a run: a row that cannot be used is said now
    # Added up in the order of the micro-batches, so that the number of ranks makes no difference.
    exam = replace(Evaluation.of(config, evals, tasks), exact=True, given=given_of(state.identity, evals))
    if found.workers > 1:
        return examine_on_ranks(config, stored, exam, found.workers)
    device = choose_device(config.cluster.device, 1)
    model, tokenizer = stored.load(config, device)
    return examine(config, model, tokenizer, exam, device)


main = main_of("eval", parser_of, _eval)

if __name__ == "__main__":
    raise SystemExit(main())
