"""Plant faults in a copy of the tree, one at a time, and see that the tests that guard the place fail.

    python -m tests.mutants [--tree TREE] [WORD ...]

Each fault names the test that must find it. It is run without the fault first: a test that fails anyway finds nothing.
`--tree`: another tree, such as one of before tests were made faster; a WORD chooses the faults that have it in their
file or their test.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    file: str
    """In raytune_fsdp/."""
    right: str
    """Is there exactly once."""
    wrong: str
    test: str
    """The node of pytest, without `tests/`."""


FAULTS = (
    # plan, data
    Fault(
        "plan/division.py",
        "return samples if self.total_samples is None else min(samples, self.total_samples)",
        "return samples",
        "distributed/test_exact.py::test_the_last_step_of_a_run_in_epochs_may_be_short",
    ),
    Fault(
        "data/stream.py",
        "samples, first = window.samples, 0 if number else cursor.index",
        "samples, first = window.samples, 0",
        "distributed/test_resume.py::test_bit_equal_at_the_same_world_size[1-fp32]",
    ),
    # step
    Fault(
        "step/train_step.py",
        "targets = counts[0].clamp(min=1)",
        "targets = batches.counts[0].clamp(min=1)",
        "distributed/test_exact.py::test_world_sizes_that_do_not_divide_the_batch[3]",
    ),
    Fault(
        "step/train_step.py",
        'derive_key("block", seed, step, batch.index)',
        'derive_key("block", seed, step, dist.get_rank())',
        "distributed/test_exact.py::test_dropout_depends_on_the_block_and_not_on_the_rank",
    ),
    Fault(
        "step/train_step.py",
        "(max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "(2 * max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "distributed/test_exact.py::test_one_rank_equals_a_plain_loop",
    ),
    Fault(
        "step/sums.py",
        "sums[1] / self._layout.replicas",
        "sums[1]",
        "distributed/test_exact.py::test_strategies_and_synchronisation_modes[3-replicate]",
    ),
    Fault(
        "step/in_order.py",
        "for owner in others:",
        "for owner in sorted(others):",
        "distributed/test_same_bits.py::test_one_rank_and_three",
    ),
    Fault(
        "step/train_step.py",
        "micro_batch_loss(model, micro_batch, objective)",
        "micro_batch_loss(model, micro_batch)",
        "distributed/test_objective.py::test_worlds_agree[gpt2-worlds0]",
    ),
    Fault(
        "step/train_step.py",
        "self.value), self.value / 2)",
        "self.value), self.value / 4)",
        "distributed/test_precision.py::test_fp16_recovers_from_an_overflow[2]",
    ),
    Fault(
        "step/optim/schedule.py",
        "after = step - 1 - warmup_steps",
        "after = step - warmup_steps",
        "distributed/test_exact.py::test_one_rank_equals_a_plain_loop",
    ),
    Fault(
        "step/optim/update.py",
        "[1 - skip.to(steps[0].dtype)]",
        "[torch.ones_like(steps[0])]",
        "distributed/test_optimizers.py::test_what_is_kept_is_what_was_asked_for",
    ),
    Fault(
        "step/optim/update.py",
        "+ (noise[2] + noise[1])",
        "+ noise[1]",
        "distributed/test_optimizers.py::test_from_the_same_gradients_every_world_makes_the_same[3]",
    ),
    Fault(
        "step/optim/adafactor.py",
        "columns[name] / parameter.shape[0] + _LEAST",
        "columns[name] / local_piece(parameter).shape[0] + _LEAST",
        "distributed/test_optimizers.py::test_from_the_same_gradients_every_world_makes_the_same[3]",
    ),
    Fault(
        "step/optim/elementwise.py",
        "(mean * self._beta1 + gradient * (1 - self._beta1)).sign()",
        "(mean + gradient * float(gradient.shape[0])).sign()",
        "distributed/test_optimizers.py::test_from_the_same_gradients_every_world_makes_the_same[3]",
    ),
    Fault(
        "step/accumulation.py",
        "or micro_batches == 1:\n        return",
        "or micro_batches:\n        return",
        "distributed/test_accumulation.py"
        "::test_gradients_of_micro_batches_in_bf16_are_one_sum_at_every_number_of_ranks[llama-2-parallel0]",
    ),
    Fault(
        "step/traffic.py",
        "trained / shards * between",
        "trained * between",
        "distributed/test_traffic.py::test_steps_send_what_is_predicted[4-2-llama-sections1]",
    ),
    # model
    Fault(
        "model/fill.py",
        'return None if all_finite(shown) else "has',
        'return None if True else "has',
        "distributed/test_initial_weights.py::test_weights_that_are_not_finite_are_named_on_every_rank",
    ),
    Fault(
        "model/adapters/merge.py",
        "found = read_whole(self._adapter, name)\n",
        "found = 2 * read_whole(self._adapter, name)\n",
        "distributed/test_adapters.py::test_what_is_exported_is_what_peft_loads_and_merges[llama-lora]",
    ),
    Fault(
        "model/added_rows.py",
        "return with_rows(logits, hidden, self.added_rows, self.bias, self.places)",
        "return logits",
        "unit/test_added_rows.py",
    ),
    Fault(
        "model/precision/quantized.py",
        "weight = widen_rows(packed, numbers, kind, grad.dtype)\n",
        "weight = 2 * widen_rows(packed, numbers, kind, grad.dtype)\n",
        "distributed/test_qlora.py::test_it_is_lora_beside_the_numbers_that_the_bytes_stand_for[llama-True-nf4]",
    ),
    Fault(
        "model/split/sequence.py",
        "return _exchanged(gradient, ctx.group), None",
        "return gradient, None",
        "distributed/test_sequence.py::test_ranks_that_share_samples_learn_what_one_learns[llama-hybrid]",
    ),
    Fault(
        "model/attention/mixers.py",
        'kwargs.get("use_cache") is not False or (',
        "(",
        "unit/test_mixers.py::test_a_text_is_generated_as_without_borders",
    ),
    Fault(
        "run/trials/mixers.py",
        '_DECAY = {"A_log": -3.0, "dt_bias": 0.0}',
        "_DECAY: dict[str, float] = {}",
        "unit/test_mixers.py::test_kernels_of_which_one_runs_on_are_refused[delta]",
    ),
    Fault(
        "model/split/tensor.py",
        "torch.where(mine[..., None], found, 0)",
        "torch.where(mine[..., None], found, found)",
        "distributed/test_tensor.py::test_ranks_that_share_layers_learn_what_one_learns[llama-both]",
    ),
    # checkpoint, record
    Fault(
        "checkpoint/catalogue.py",
        "each.step % keep.every == 0",
        "each.step % keep.every == 1",
        "distributed/test_saving.py::test_the_best_are_kept",
    ),
    Fault(
        "checkpoint/manifest.py",
        "return None if digest == wanted[file][1] else f",
        "return None if digest else f",
        "distributed/test_resume.py::test_a_damaged_checkpoint_is_passed_over",
    ),
    Fault(
        "record/repair.py",
        "    os.replace(temporary, path)\n    sync_directory(path.parent)\n    return taken",
        "    temporary.unlink()\n    return taken",
        "distributed/test_resume.py::test_a_killed_run_continues_from_its_last_checkpoint",
    ),
    # base, run, predict, launch, convert
    Fault(
        "base/redaction.py",
        '        r"\\bgsk_[A-Za-z0-9]{20,}",\n',
        "",
        "distributed/test_secrets.py",
    ),
    Fault(
        "run/evaluation/early_stop.py",
        "waited < rule.patience",
        "waited <= rule.patience",
        "distributed/test_early_stop.py::test_at_the_same_step_on_any_number_of_ranks[2]",
    ),
    Fault(
        "predict/page/text.py",
        "    if seconds.exchanged:\n",
        "    if seconds.added:\n",
        "unit/test_sequence.py::test_the_page_says_what_attention_exchanges",
    ),
    Fault(
        "launch/shared_storage.py",
        'return None if token.path.read_bytes() == token.text.encode() else "the',
        'return None if token.path.read_bytes() else "the',
        "distributed/test_shared_storage.py::test_the_same_names_with_other_content_are_not_the_same_storage",
    ),
    Fault(
        "convert/schedules.py",
        'if kind == "linear":\n        return {"type": "linear"}',
        'if kind == "linear":\n        return {"type": "cosine"}',
        "unit/test_convert.py",
    ),
    # preferences
    Fault(
        "model/objective/groups.py",
        "per_group=targets / groups",
        "per_group=targets / targets",
        "distributed/test_preference.py::test_a_plain_loop_and_all_worlds_agree[dpo and sft-best_fit-worlds0]",
    ),
    Fault(
        "model/objective/groups.py",
        "answers=position >= skipped[document]",
        "answers=position >= 0",
        "unit/test_preference_loss.py::test_values_and_gradients_are_those_of_the_book",
    ),
    Fault(
        "model/objective/kto.py",
        "return (sum_ / groups).clamp(min=0)",
        "return sum_ / groups",
        "unit/test_preference_loss.py::test_a_negative_divergence_counts_as_none",
    ),
    Fault(
        "data/groups.py",
        "members = [_from(each, gone) for each in document.members]",
        "members = [_from(document, gone), *document.others]",
        "unit/test_preference_windows.py::test_a_pair_that_is_too_long_loses_its_prompt_on_both_sides",
    ),
    Fault(
        "data/reference.py",
        "ids[here].tobytes() + labels[here].tobytes()",
        "ids[here].tobytes()",
        "unit/test_reference.py::test_a_document_is_its_tokens_and_which_of_them_count",
    ),
    Fault(
        "data/reference.py",
        "if head != self._head(epoch, k, many):",
        "if not head:",
        "unit/test_reference.py::test_a_file_is_read_as_it_was_written_and_no_other_way",
    ),
    Fault(
        "run/reference/attempt.py",
        "if not found.is_complete and not (model.is_start and standing.checkpoint is None):",
        "if not found.is_complete and not model.is_start:",
        "distributed/test_reference.py::test_the_reference_of_a_run_from_an_adapter_is_the_adapted_model",
    ),
    Fault(
        "run/reference/unchanged.py",
        "if before.get(name, digest) != digest:",
        "if False:",
        "distributed/test_reference.py::test_other_values_are_refused_by_name",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant faults, and see that tests find them.")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    faults = [each for each in FAULTS if not given.words or any(w in f"{each.file} {each.test}" for w in given.words)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        tree = Path(directory) / "tree"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "*.egg-info")
        shutil.copytree(given.tree, tree, ignore=ignored)
        lost = list(_survivors(faults, tree))
    print(f"{len(faults) - len(lost)} of {len(faults)} faults are found")
    return 1 if lost else 0


def _survivors(faults: list[Fault], tree: Path) -> Iterator[Fault]:
    right: dict[str, int] = {}
    for fault in faults:
        file = tree / "raytune_fsdp" / fault.file
        text = file.read_text()
        assert text.count(fault.right) == 1, f"{fault.file}: {text.count(fault.right)} times {fault.right!r}"
        if fault.test not in right:
            right[fault.test] = _ends_with(fault.test, tree)
        file.write_text(text.replace(fault.right, fault.wrong))
        since = time.monotonic()
        try:
            code = _ends_with(fault.test, tree)
        finally:
            file.write_text(text)
        found = right[fault.test] == 0 and code == 1
        how = "found" if found else f"NOT FOUND (without it pytest ends with {right[fault.test]}, with it with {code})"
        print(f"{how:9} {time.monotonic() - since:5.0f} s  {fault.file}: {fault.wrong.strip()[:60]!r}", flush=True)
        if not found:
            yield fault


def _ends_with(test: str, tree: Path) -> int:
    """The exit code of pytest: 1 if a test fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", f"tests/{test}"]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True).returncode


if __name__ == "__main__":
    sys.exit(main())
