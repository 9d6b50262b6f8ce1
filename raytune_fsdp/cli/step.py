"""`raytune-fsdp step`: show which rows a step of a run trained on, and how the model did on each of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.base.untrusted import printable, printable_json
from raytune_fsdp.cli.common import BASE, RUNS_CODE, ConfigParser, add_trust, config_of_run, main_of
from raytune_fsdp.cli.progress import show_progress

if TYPE_CHECKING:
    from raytune_fsdp.checkpoint.catalogue import CommittedCheckpoint
    from raytune_fsdp.config import FinetuneConfig
    from raytune_fsdp.tools.audit.past import PastStep

Losses = Sequence[Sequence[tuple[float, int]]]
"""The sum of its targets' losses and the number of targets, for each document of each sample."""


def parser_of(prog: str) -> ConfigParser:
    parser = ConfigParser(
        prog,
        "Show which rows were in a step of a run, from the run directory and the data; the record proves that these "
        "are the right ones.",
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("step", type=int, help="number of the step, as in metrics.jsonl")
    parser.add_argument("--text", action="store_true", help="show the text, with the tokens that are trained on marked")
    parser.add_argument(
        "--loss",
        action="store_true",
        help="show the loss of each document: as recorded (tracking.documents), else under the weights of the nearest "
        "kept checkpoint before the step",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON for every document")
    add_trust(parser, base=BASE, code=RUNS_CODE)
    return parser


def _step(parser: ConfigParser, arguments: list[str]) -> int:
    if (run := parser.first_word(arguments, "RUN STEP")) is not None:
        parser.default_config = config_of_run(Path(run))
    found, config = parser.parse_with_config(arguments)
    if found.step < 1:
        parser.error(f"step {found.step}: steps count from 1")
    from raytune_fsdp.launch.quiet import quiet

    quiet()
    from raytune_fsdp.run.places import check_places
    from raytune_fsdp.tools.audit.past import (
        check_code,
        checkpoint_before,
        past_place,
        past_step,
        placed,
        recorded_losses,
    )

    check_code(config, trusted=found.trust_remote_code)
    check_places(
        found.run, trusted=found.trust_places, config=config if found.config is None else None, base=found.base
    )
    place = past_place(found.run)
    config = placed(config, place)
    with show_progress() as progress:
        past = past_step(config, place, found.step, progress)
    losses: Losses | None = recorded_losses(place, past) if found.loss else None
    grouped = config.train.objective.rows is not None and not config.train.objective.scores
    taught = config.train.objective.learns
    whence, loss_is = _kind_of(config.train.loss, None, grouped=grouped)
    if found.loss and losses is None:
        if config.model.head is not None:
            raise ConfigError(
                "--loss: the model of this run scores documents (model.head) and predicts no token, so a checkpoint of "
                "it gives them no cross-entropy: leave --loss out"
            )
        checkpoint = checkpoint_before(place, found.step)
        if checkpoint is None:
            raise ConfigError(
                f"--loss: {place.checkpoints} has no checkpoint from before step {found.step} any more; leave --loss "
                "out, keep more checkpoints (checkpoint.keep_every), or record them (tracking.documents)"
            )
        losses = _losses(config, past, checkpoint, trust=found.trust_remote_code, base=found.base)
        whence, loss_is = _kind_of(config.train.loss, checkpoint, grouped=grouped or taught)
    if found.json:
        for *_, about in _documents(past, losses):
            about.update({"loss_is": loss_is} if losses is not None else {})
            print(printable_json(json.dumps(about, ensure_ascii=False)))
        return 0
    for line in _lines(past, losses, whence, text=found.text):
        print(line)
    return 0


def _kind_of(own: str | None, checkpoint: CommittedCheckpoint | None, *, grouped: bool = False) -> tuple[str, str]:
    """Say what losses these are, to people and to programs: recorded ones, or those under a checkpoint.

    `grouped`: the run's losses are of pairs or judged answers, which no single document has; or, under a checkpoint, of
    a teacher's predictions.
    """
    if checkpoint is None and grouped:
        return "cross-entropies by document, as recorded", "cross-entropy"
    if checkpoint is None:
        return f"{'losses' if own is None else f'values of train.loss={own}'} by document, as recorded", "as trained"
    what = "losses" if own is None and not grouped else "cross-entropies"
    return f"{what} by document under the weights of step {checkpoint.step} ({checkpoint.path})", "cross-entropy"


def _losses(
    config: FinetuneConfig, past: PastStep, checkpoint: CommittedCheckpoint, *, trust: bool, base: str | None
) -> Losses:
    from raytune_fsdp.checkpoint.model_files import load_for_inference
    from raytune_fsdp.launch.worker import alone, choose_device
    from raytune_fsdp.run.evaluation.losses import document_losses
    from raytune_fsdp.run.trials.needs import use_attention_for_packed

    device = choose_device(config.cluster.device, 1)
    model, _ = load_for_inference(Path(checkpoint.path), device, trust_remote_code=trust, base=base)
    use_attention_for_packed(config, model, device)
    with alone(device):
        samples = [each.sample for each in past.samples]
        return document_losses(model, samples, micro_batch=config.train.micro_batch, device=device)


def _documents(past: PastStep, losses: Losses | None) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield for each document the number of its sample, its number in the sample, and facts about it."""
    from raytune_fsdp.base.batch import IGNORE
    from raytune_fsdp.record.report.data import documents_of, role_of

    for number, each in enumerate(past.samples):
        sample = each.sample
        for index, (document, origin) in enumerate(zip(documents_of(sample), each.origins, strict=True)):
            about: dict[str, Any] = {
                "step": past.step,
                "sample": number + 1,
                "dataset": past.windows.names[origin.dataset],
                "row": origin.where,
                "first_token": origin.first_token,
                "tokens": document.stop - document.start,
                "trained": int((sample.labels[document] != IGNORE).sum()),
            }
            if role := role_of(sample, document, past.windows.columns, past.windows.scoring):
                about["role"] = ", ".join(role)
            if losses is not None:
                total, targets = losses[number][index]
                about["loss"] = total / targets if targets else None
            yield number, index, about


def _lines(past: PastStep, losses: Losses | None, whence: str, *, text: bool) -> Iterator[str]:
    from raytune_fsdp.record.report.data import documents_of, headline, text_of

    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if past.line is None:
        yield f"step {past.step} is not on record: these {len(past.samples)} packed samples are what it will train on"
    else:
        line = past.line["trajectory"]
        yield (
            f"step {past.step}: {len(past.samples)} packed samples, {line['tokens']:,} tokens, "
            f"{line['target_tokens']:,} trained; loss {line['loss']:.4f}, gradient norm {line['grad_norm']:.4g}, "
            f"learning rate {line['lr']:.3e}"
        )
    if losses is not None:
        yield printable(whence)
    for number, index, about in _documents(past, losses):
        each = past.samples[number]
        if index == 0:
            at = f"epoch {each.at.epoch}, window {each.at.window}, place {each.at.index}"
            yield headline(each.sample, f"sample {number + 1} ({at})", colours=colours)
        cut = f", from its token {about['first_token']:,} on" if about["first_token"] else ""
        loss = f", loss {about['loss']:.4f}" if about.get("loss") is not None else ""
        role = f", {about['role']}" if "role" in about else ""
        counts = f"{about['tokens']:,} tokens, {about['trained']:,} trained{loss}"
        yield printable(f"  -- {about['dataset']}, {about['row']}{role}{cut}: {counts}")
        if text:
            yield from text_of(each.sample, documents_of(each.sample)[index], past.tokenizer, colours=colours)


main = main_of("step", parser_of, _step)

if __name__ == "__main__":
    raise SystemExit(main())
