"""Mistakes on the command line, in files and in rows, with the whole line that each gets: at most two lines of a
terminal of 100 columns."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytune_fsdp.cli.main import main
from raytune_fsdp.config.load import load_config
from tests.unit.test_mistakes import CHAT, FLAGS, ROWS, lines

FILES = {
    "chat.jsonl": lines(CHAT),
    "empty.jsonl": "",
    "rows.csv": "question;answer\na;b\n",
    "broken.parquet": "PAR1 nothing",
    "robot.jsonl": lines([{"messages": [{"role": "robot", "content": "x"}]}]),
    "text.jsonl": lines([{"messages": "hello"}]),
    "none.jsonl": lines([{"messages": []}]),
    "user.jsonl": lines([{"messages": [{"role": "user", "content": "x"}]}]),
    "long.jsonl": lines([{"text": "w " * 600}]),
    "notes.md": "# notes\n",
    "tab.yaml": "run:\n\tname: x\n",
    "colon.yaml": "run:\n  name x\n  storage: y\n",
    "quote.yaml": "run:\n  name: 'x\nmodel: {path: m}\n",
    "bracket.yaml": "run: {name: x\nmodel: {path: m}\n",
    "list.yaml": "- run\n- model\n",
    "twice.yaml": "run: {name: x}\nrun: {name: y}\n",
    "nothing.yaml": "",
    "folder/config.json": json.dumps({"model_type": "llama"}),
    "away/notes.txt": "x",
}

COMMANDS = {
    # Words of the command.
    "trian": "unknown command trian; nearest: train; `raytune-fsdp --help` lists the commands",
    "train run.yaml": "unexpected argument run.yaml; a config file is given with --config run.yaml (raytune-fsdp train "
    "--help)",
    "train --confg demo": "unknown argument --confg; nearest: --config (raytune-fsdp train --help)",
    "data previw": "unknown command data previw; nearest: preview; commands: preview, stats, clean",
    "checkpoint verfy x": "unknown checkpoint verfy; nearest: verify; there are now, list, verify, metadata "
    "(raytune-fsdp checkpoint --help)",
    "recipes shwo": "unknown recipes shwo; nearest: show; there are list, show, copy (raytune-fsdp recipes --help)",
    "recipes show qwen3-8b": "unknown recipe qwen3-8b; nearest: qwen3-8b-lora; `raytune-fsdp recipes` lists all "
    "(raytune-fsdp recipes --help)",
    "recipes copy": "copy needs the name of a recipe; `raytune-fsdp recipes` lists them (raytune-fsdp recipes --help)",
    "export runs/x": "missing: DESTINATION; usage: raytune-fsdp export [-h] source destination (raytune-fsdp export "
    "--help)",
    "schema optim": "unknown argument optim (raytune-fsdp schema --help)",
    "plan --config demo --world-size 0": "--world-size 0 must be at least 1 (raytune-fsdp plan --help)",
    "plan --config demo --world-size three": "--world-size 'three': must be a whole number (raytune-fsdp plan --help)",
    "generate folder hi --max-new-tokens 0": "--max-new-tokens 0 must be at least 1 (raytune-fsdp generate --help)",
    "average away out --last 1": "--last 1 must be at least 2; for one checkpoint, use `raytune-fsdp export` "
    "(raytune-fsdp average --help)",
    "sweep": "missing: SWEEP; usage: raytune-fsdp sweep [-h] sweep (raytune-fsdp sweep --help)",
    "sweep demo --json": "--json goes with --dry-run (raytune-fsdp sweep --help)",
    "sweep demo --gpus-per-node 4": "--gpus-per-node is for a prediction: name the device, too (--gpu A100-80GB) "
    "(raytune-fsdp sweep --help)",
    "sweep demo --price 2": "--price is for a prediction: name the device, too (--gpu A100-80GB) (raytune-fsdp sweep "
    "--help)",
    "convert": "FILE is missing: name the YAML file of the other trainer (raytune-fsdp convert --help)",
    # Runs that are not there, and directories that are none.
    "chat runs/nope": "runs/nope: there is no such directory; name a run, a checkpoint, or a Hugging Face model "
    "directory",
    "export runs/nope out": "{here}/runs/nope does not exist; name a run, <run.storage>/<run.name>, or one of its "
    "checkpoints",
    "average runs/nope out": "runs/nope does not exist; name a run, <run.storage>/<run.name>",
    "digest runs/nope": "{here}/runs/nope does not exist; name a run, <run.storage>/<run.name>, or one of its "
    "checkpoints",
    "runs runs/nope": "runs/nope: no such directory; give the run.storage of your configs",
    "watch runs/nope": "runs/nope: no such directory; give a run directory, <run.storage>/<run.name>",
    "logs runs/nope": "runs/nope: no such directory; give a run directory, <run.storage>/<run.name>",
    "stop runs/nope": "runs/nope: no such directory; give a run directory, <run.storage>/<run.name>",
    "checkpoint list runs/nope": "runs/nope: no such directory; give a run directory, <run.storage>/<run.name>",
    "report away": "{here}/away is not a run directory (it has no plan.json); give <run.storage>/<run.name>, as "
    "`raytune-fsdp train` prints it at the end",
    "step away 3": "away is not a run directory: it has no config.yaml; give <run.storage>/<run.name>",
    "audit away": "away is not a run directory: it has no config.yaml; give <run.storage>/<run.name>",
    "fork away": "away is not a run directory: it has no config.yaml; give <run.storage>/<run.name>",
    "fork --at 4": "the run comes first: raytune-fsdp fork RUN [arguments] (raytune-fsdp fork --help)",
    "fork --unpin runs/x": "--unpin runs/x: no run in {here}/runs has a pin of it; name the run that it forked: `fork "
    "RUN --unpin FORK`; of a fork that was moved, give the path that it had when it began",
    "data clean nope": "nope is not a directory; give the cache of a run: data.cache.path, or run.storage/cache",
    # Files that are no configs.
    "plan --config tab.yaml": "config file tab.yaml: line 2: it begins with a tab, and YAML is indented with spaces "
    "(found character '\\t' that cannot start any token)",
    "plan --config colon.yaml": "config file colon.yaml: line 3: the line above has no colon with a space after it "
    "(mapping values are not allowed here)",
    "plan --config quote.yaml": "config file quote.yaml: line 4: the text in quotes that begins in line 2 has no end "
    "(found unexpected end of stream)",
    "plan --config bracket.yaml": "config file bracket.yaml: line 2: the map in braces that begins in line 1 has no "
    "end (expected ',' or '}}', but got ':')",
    "plan --config list.yaml": "config file list.yaml: is a list, must be a map of sections (run, model, data, method, "
    "parallel, optim, train, reference, teacher, checkpoint, eval, tracking, profile, cluster, export)",
    "plan --config nothing.yaml": "config file nothing.yaml: is empty, must be a map of sections (run, model, data, "
    "method, parallel, optim, train, reference, teacher, checkpoint, eval, tracking, profile, cluster, export)",
    "plan --config twice.yaml": "config file twice.yaml: line 2: 'run' is written twice in the same map (first in line "
    "1)",
    "plan --config folder": "config file folder: Is a directory",
    "plan --config folder/config.json": "config file folder/config.json: is a model's config.json, not a run's: name "
    "its directory in model.path",
    "plan --config nope": "config file nope: no such file (relative paths start at {here}), and no recipe "
    "(`raytune-fsdp recipes` lists them)",
    "convert nothin.yaml": "nothin.yaml: no such file (relative paths start at {here}); nearest: nothing.yaml",
    "convert nothing.yaml": "nothing.yaml: is empty, must be a map of options",
    "convert chat.jsonl": "chat.jsonl: line 2: a second document begins here, and a config is one (expected '<document "
    "start>', but found '{{')",
}

PREVIEW = "data preview --config demo --data.eval=[] --data.train.0.path="
DATA = {
    "empty.jsonl": "empty.jsonl: has no rows (0 bytes); a JSON Lines file is UTF-8 text with one JSON object a line: "
    "correct the dataset's path, or remove the file",
    "rows.csv --data.train.0.format.type=instruction": "rows.csv: its columns seem to be separated by ';' (the header "
    "is 'question;answer'); a CSV file has commas: convert it",
    "broken.parquet": "broken.parquet: cannot be read (Parquet magic bytes not found in footer. Either the file is "
    "corrupted or this is not a parquet file.); check that it exists, is complete and may be read",
    "robot.jsonl": "robot.jsonl:1: messages[0].role=robot is missing or unknown; it must be one of system, developer, "
    "user, assistant, tool, or be mapped by format.roles; or set data.bad_rows=skip",
    "text.jsonl": 'text.jsonl:1: messages=hello is not a list of messages; each row needs [{"role": "user", "content": '
    '"…"}, {"role": "assistant", "content": "…"}]; or set data.bad_rows=skip',
    "none.jsonl": "none.jsonl:1: messages=[] has no messages; correct or remove the row; or set data.bad_rows=skip",
    "user.jsonl": "user.jsonl:1: no token of the row can be trained on (2 tokens, the first is never a target); it "
    "needs a message of the assistant that the template marks as generated; or set data.bad_rows=skip",
    "long.jsonl --data.train.0.format.type=completion": "long.jsonl:1: the row has 602 tokens, more than "
    "data.seq_len=256; raise data.seq_len to 602, or set data.long_documents to truncate, split or drop; or set "
    "data.bad_rows=skip",
    "notes.md": "notes.md: its ending does not say what it is; set file_type to jsonl, json, csv, text, parquet or "
    "arrow, or narrow the dataset's path to the files you want",
    "away/*.jsonl": "away/*.jsonl: no file matches this pattern (relative to {here}); correct the dataset's path",
    "chat.jsonl --data.chat_template=chatml2": "data.chat_template='chatml2' cannot be read (No such file or "
    "directory); it must be a text file with a Jinja template, or one of chatml, llama-2, llama-3, openassistant; "
    "nearest: chatml",
    "chat.jsonl --data.train.0.format.messages=mesages": "chat.jsonl: has no column 'mesages', it has 'messages'; name "
    "the right one in the dataset's format.messages",
    "chat.jsonl '--data.eval={rows: 9}'": "data.eval.rows=9 holds 9 of the 4 row(s) of data.train out, so none is left "
    "to train on; lower it, or name other data in data.eval",
    "chat.jsonl --eval nope": "--eval nope: no evaluation dataset has this name; all: none (raytune-fsdp data preview "
    "--help)",
    "chat.jsonl --samples 0": "--samples 0 must be at least 1 (raytune-fsdp data preview --help)",
}

VALUES = {
    "--run.fork={run: base, step: 0}": "run.fork.step=0: must be integer >= 1 (from flag --run.fork)",
    "--train.max_steps=ten": "train.max_steps=ten: must be integer >= 1, or null (from flag --train.max_steps)",
    "--optim.lr=-1": "optim.lr=-1: must be number > 0 (from flag --optim.lr)",
    "--parallel.precision=bf61": "parallel.precision=bf61: must be one of bf16, fp32, fp64, fp16, bf16_pure, fp8; "
    "nearest: bf16 (from flag --parallel.precision)",
    "--optim.schedule.type=cosin": "optim.schedule.type=cosin: must be one of constant, linear, cosine, wsd, "
    "polynomial, inverse_sqrt, one_cycle; nearest: cosine (from flag --optim.schedule.type)",
    "--optim.schedule=cosine": "optim.schedule=cosine: here it is {type: cosine} (from flag --optim.schedule)",
    "--method=LoRA": "method=LoRA: here it is {type: lora} (from flag --method)",
    "--method.type=lroa": "method.type=lroa: must be one of full, freeze, lora, qlora, ia3; nearest: lora (from flag "
    "--method.type)",
    "--method.rank=8": "method.rank=8: unknown field with type full; nearest: method.rank with type lora or qlora; "
    "method has type, routers (from flag --method.rank)",
    "--optim.betas=[0.9,0.95]": "optim.betas: unknown field; here it is optim.beta1 and optim.beta2 (from flag "
    "--optim.betas)",
    "--optim.foo=1": "optim.foo=1: unknown field; `raytune-fsdp train --help optim` lists all (from flag --optim.foo)",
    "--run.name=a/b": "run.name=a/b: must be 1 to 128 letters, digits, '.', '_' or '-', starting with a letter or "
    "digit, without '..' or '/' (from flag --run.name)",
    "--run.stop_after=0": "run.stop_after=0: must be integer >= 1, or null (from flag --run.stop_after)",
    "--run.name=cache": "run.name=cache: 'cache' is the directory of prepared data in run.storage; choose another name "
    "(from flag --run.name)",
    "--run.storage=s3://bucket/runs": "run.storage=s3://bucket/runs: must be a directory on a mounted file system "
    "(object stores are not supported yet) (from flag --run.storage)",
    "--run.storage=$SCRATCH/runs": "run.storage=$SCRATCH/runs: $SCRATCH is not expanded in a config: write the path "
    "itself, or give the field as a flag in double quotes, where the shell does it (from flag --run.storage)",
    "--data.train=chat.jsonl": "data.train=chat.jsonl: must be list of maps (at least 1) (from flag --data.train)",
    "--data.train.path=chat.jsonl": "--data.train.path: data.train is a list; name an item by its index, as in "
    "--data.train.0",
    "--data.train.5.path=x": "--data.train.5.path: data.train has 1 item; --data.train.1 appends the next one",
    "--checkpoint.every": "--checkpoint.every: needs a value (--checkpoint.every VALUE or --checkpoint.every=VALUE)",
    "--train.epochs=1": "train.max_steps=5 and train.epochs=1.0: set exactly one of the two (from flag --train.epochs)",
    "--train.micro_batch=3": "train.global_batch=4 is not a multiple of train.micro_batch=3; nearest valid: 3 or 6 "
    "(from flag --train.micro_batch)",
    "--cluster.workers=0": "cluster.workers=0: must be integer >= 1, map of min and max, or auto (from flag "
    "--cluster.workers)",
    "--tracking.wandb=true": "tracking.wandb=true: must be a map with fields enabled, project, entity (from flag "
    "--tracking.wandb)",
    "--data.packing=true": "data.packing=true: must be one of best_fit, concat, none (from flag --data.packing)",
    "--checkpoint.keep_last=1": "checkpoint.keep_last=1: must be integer >= 2, or null (from flag "
    "--checkpoint.keep_last)",
    "--checkpoint.peer_every=3": "checkpoint.peer_every=3 with checkpoint.peer_copies=0: there are no copies; set "
    "checkpoint.peer_copies=1, or leave peer_every out (from flag --checkpoint.peer_every)",
    "--model.dtype=bf16": "model.dtype=bf16: unknown field; here it is parallel.precision (from flag --model.dtype)",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    yield tmp_path


def test_there_are_enough() -> None:
    assert len(COMMANDS) + len(DATA) + len(VALUES) + len(FLAGS) + len(ROWS) >= 120


def check(command: str, expected: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: {expected}\n")
    assert len(textwrap.wrap(err.replace(str(here), "/here"), 100)) <= 2, "one line, of two lines of a terminal at most"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(command, COMMANDS[command].format(here=here), here, capsys)


@pytest.mark.parametrize("rows", DATA)
def test_data(rows: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(f"{PREVIEW}{rows}", DATA[rows].replace("{here}", str(here)), here, capsys)


@pytest.mark.parametrize("flag", VALUES)
def test_a_value(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    from raytune_fsdp.base.errors import ConfigError
    from tests.unit.test_mistakes import SECTIONS

    with pytest.raises(ConfigError) as caught:
        load_config(SECTIONS, [flag])
    assert str(caught.value) == VALUES[flag]
    assert len(textwrap.wrap(VALUES[flag], 100)) <= 2
