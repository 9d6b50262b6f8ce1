"""Row formats of the user's own: texts with columns in them, and functions."""

from __future__ import annotations

import json
import pickle
import py_compile
import sys
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from pydantic import ValidationError

from raytune_fsdp.base.errors import DataError
from raytune_fsdp.config import DatasetConfig, PythonFormat, TemplateFormat
from raytune_fsdp.data.rows.formats import Document, Formatter
from raytune_fsdp.data.windows import Windows
from tests.rows import make_windows
from tests.unit.made_tokenizers import convert, demo, pieces, refusal

ROW = {"question": "What?", "answer": "The GPU.", "the n": 3, "a.b": "dot", "none": None, "list": [1]}


def template(prompt: str, completion: str = "{answer}", **options: Any) -> TemplateFormat:
    return TemplateFormat(type="template", prompt=prompt, completion=completion, **options)


@pytest.mark.parametrize(
    ("prompt", "completion", "text"),
    [
        ("Q: {question}\nA: ", "{answer}", ["Q: What?\nA: ", "The GPU.<|endoftext|>"]),
        ("{{{question}}} {a.b} {the n}}}{{", "{answer}", ["{What?} dot 3}{", "The GPU.<|endoftext|>"]),
        ("{{question}}", "{answer}{answer}", ["{question}", "The GPU.The GPU.<|endoftext|>"]),
    ],
)
def test_template_puts_columns_into_texts_and_trains_the_answer(prompt: str, completion: str, text: list[str]) -> None:
    document = convert(ROW, template(prompt, completion), demo())
    assert pieces(document, demo()) == [(text[0], False), (text[1], True)]


def test_template_as_a_conversation_or_trained_as_a_whole() -> None:
    document = convert(ROW, template("{question}", style="chat"), demo())
    assert pieces(document, demo())[0] == ("<|user|>What?<|assistant|>", False)
    document = convert(ROW, template("{question} ", loss="all"), demo())
    assert pieces(document, demo()) == [("What? The GPU.<|endoftext|>", True)]


@pytest.mark.parametrize(
    ("prompt", "completion", "reason", "message"),
    [
        ("{query}", "{answer}", "missing_column", r"no column 'query', it has 'question', 'answer'.*format\.prompt"),
        ("", "{question.__class__}", "missing_column", r"no column 'question\.__class__'.*format\.completion"),
        ("{none}", "{answer}", "null", "'none' is null"),
        ("{list}", "{answer}", "wrong_type", r"list=\[1\] is not text or a number but list"),
    ],
)
def test_template_names_the_column_that_a_row_lacks(prompt: str, completion: str, reason: str, message: str) -> None:
    error = refusal(ROW, template(prompt, completion), demo())
    assert error.reason == reason
    with pytest.raises(DataError, match=message):
        raise error


@pytest.mark.parametrize(
    ("prompt", "completion", "message"),
    [
        ("{", "{answer}", "single {; write {{"),
        ("a } b", "{answer}", "single }; write }}"),
        ("{}", "{answer}", "without a name"),
        ("x", "yes", "names no column"),
    ],
)
def test_template_that_cannot_be_read(prompt: str, completion: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        template(prompt, completion)


MODULE = """
import itertools
calls = itertools.count()

def chat(row):
    return {"messages": [{"role": "user", "content": row.pop("q")}, {"role": "assistant", "content": row["a"]}]}

def pair(row):
    return {"instruction": row["q"], "output": row["a"]}

def changing(row):
    return {"text": f"{row['q']} {next(calls)}"}

def failing(row):
    raise KeyError("q")

def nothing(row):
    return None
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "rows_of_mine.py"
    file.write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "rows_of_mine", raising=False)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"q": f"Is it {i}?", "a": "Yes."}) + "\n" for i in range(30))
    )
    return file


def python(function: str, **returns: Any) -> PythonFormat:
    return PythonFormat.model_validate(
        {"type": "python", "function": f"rows_of_mine:{function}", **({"then": returns} if returns else {})}
    )


def test_function_makes_rows_that_are_read_in_another_format(module: Path) -> None:
    row = {"q": "What?", "a": "The GPU."}
    document = convert(row, python("chat"), demo())
    assert pieces(document, demo())[-1] == ("The GPU.<|endoftext|>", True) and row["q"] == "What?"
    document = convert(row, python("pair", type="instruction", style="plain"), demo())
    assert pieces(document, demo()) == [("What?", False), ("The GPU.<|endoftext|>", True)]


def test_bad_rows_of_a_function_are_named(module: Path) -> None:
    error = refusal({"q": "x"}, python("failing"), demo())
    assert error.reason == "function" and str(error).startswith("f.jsonl:7: rows_of_mine:failing raised KeyError: 'q';")
    error = refusal({"q": "x"}, python("nothing"), demo())
    assert "returned None, not a dict" in str(error)


def test_function_is_imported_where_rows_are_read_and_nowhere_else(module: Path) -> None:
    absent = PythonFormat(type="python", function="not_there:chat")  # as `export` and `generate` read a config
    with pytest.raises(
        DataError, match=rf"not_there cannot be imported on .* looked for in .*{module.parent}"
    ) as caught:
        Formatter(absent, tokenizer=demo(), vocab_size=5000, template=None)
    assert caught.value.exit_code == 2
    with pytest.raises(DataError, match="has no function missing"):
        Formatter(python("missing"), tokenizer=demo(), vocab_size=5000, template=None)
    for name in ("rows", "rows:", ":chat", "a b:c", "rows.py:chat"):
        with pytest.raises(ValidationError):
            PythonFormat(type="python", function=name) if name != "rows.py:chat" else PythonFormat(
                type="python", function="rows/py:chat"
            )


def test_worker_with_another_file_refuses(module: Path) -> None:
    sent = pickle.dumps(Formatter(python("chat"), tokenizer=demo(), vocab_size=5000, template=None))
    (document,) = pickle.loads(sent).documents([{"q": "x", "a": "y"}], ["f:1"])
    assert isinstance(document, Document)
    module.write_text(MODULE + "\n")
    with pytest.raises(DataError, match=r"rows_of_mine\.py on .* is not the file that the run was started with"):
        pickle.loads(sent)


def test_function_that_makes_two_documents_of_one_row_is_refused(module: Path, tmp_path: Path) -> None:
    dataset = DatasetConfig(path=str(tmp_path / "rows.jsonl"), format=python("changing", type="completion"))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the format's function, called twice, made two different"):
        make_windows([dataset], cache=tmp_path / "cache")


def test_whole_file_of_a_function_decides_the_windows(module: Path, tmp_path: Path) -> None:
    dataset = DatasetConfig(path=str(tmp_path / "rows.jsonl"), format=python("chat"))
    before = make_windows([dataset], cache=tmp_path / "cache", seq_len=64)
    assert before.get(0, 0)[0].samples.input_ids.size
    module.write_text(MODULE + "\n# another comment\n")
    with pytest.raises(
        DataError, match=r"^format\.function=rows_of_mine:chat: .*has changed since this process imported"
    ):
        make_windows([dataset], cache=tmp_path / "cache", seq_len=64)
    del sys.modules["rows_of_mine"]  # as in another process
    after = make_windows([dataset], cache=tmp_path / "cache", seq_len=64)
    assert before.fingerprint != after.fingerprint
    changed = {key for key in before.identity if before.identity[key] != after.identity[key]}
    assert changed == {"datasets.0.function_file"}


TAGS = """
import helper_of_mine

def chat(row):
    import later_of_mine
    text = helper_of_mine.text(row) + later_of_mine.END
    return {"messages": [{"role": "user", "content": row["q"]}, {"role": "assistant", "content": text}]}

def tagged(row):
    print("noise")
    return {"text": " ".join(set(row["q"].split()) | {str(i) for i in range(12)})}

def numbered(row, known={}):
    return {"text": row["q"] + str(known.setdefault(row["q"], len(known)))}
"""


@pytest.fixture
def helped(module: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A function whose module imports another one, which imports a third; and a fourth when it is called."""
    module.write_text(TAGS)
    package = module.parent / "parts_of_mine"
    package.mkdir()
    (package / "words.py").write_text("ANSWER = 'Yes.'\n")
    (module.parent / "later_of_mine.py").write_text("END = ''\n")
    file = module.parent / "helper_of_mine.py"
    file.write_text("import json, numpy\nfrom parts_of_mine import words\n\ndef text(row): return words.ANSWER\n")
    for name in ("helper_of_mine", "later_of_mine", "parts_of_mine", "parts_of_mine.words"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return file


def modules_in(windows: Windows) -> dict[str, str]:
    """Those that its identity names."""
    first = "datasets.0.function_modules."
    return {key.removeprefix(first): value for key, value in windows.identity.items() if key.startswith(first)}


def test_modules_that_a_function_imports_decide_the_windows(helped: Path, tmp_path: Path) -> None:
    """Also one that it imports only when it is called; not those that are installed."""
    dataset = DatasetConfig(path=str(tmp_path / "rows.jsonl"), format=python("chat"))
    before = make_windows([dataset], cache=tmp_path / "cache", seq_len=64)
    names = ["helper_of_mine", "later_of_mine", "parts_of_mine.words"]
    assert sorted(modules_in(before)) == names
    assert before.identity["order_version"] == 4
    for changed in ("parts_of_mine.words", "later_of_mine"):
        with open(tmp_path / f"{changed.replace('.', '/')}.py", "a") as file:
            file.write("# another comment\n")
        for name in (*names, "rows_of_mine"):
            sys.modules.pop(name, None)  # as in another process
        after = make_windows([dataset], cache=tmp_path / "cache", seq_len=64)
        assert {key for key in before.identity if before.identity[key] != after.identity[key]} == {
            f"datasets.0.function_modules.{changed}"
        }
        assert before.fingerprint != after.fingerprint
        before = after
    # A run that was begun when they were not in it goes on, and finds its windows.
    old = make_windows([dataset], cache=tmp_path / "cache", seq_len=64, order_version=2)
    assert not modules_in(old) and old.identity["order_version"] == 2


def test_worker_with_another_helper_refuses(helped: Path, tmp_path: Path) -> None:
    dataset = DatasetConfig(path=str(tmp_path / "rows.jsonl"), format=python("chat"))
    windows = make_windows([dataset], cache=tmp_path / "cache", seq_len=64)
    sent = pickle.dumps(windows)
    assert len(pickle.loads(sent).get(0, 0)[0].samples.input_ids)
    (tmp_path / "later_of_mine.py").write_text("END = '!'\n")
    with pytest.raises(DataError, match=r"later_of_mine\.py on .* is not the file that the run was started with"):
        pickle.loads(sent).get(0, 1)


def test_function_without_helpers_keeps_its_windows(module: Path, tmp_path: Path) -> None:
    """In the identity only where there is such a module: what older trees have cached is found."""
    dataset = DatasetConfig(path=str(tmp_path / "rows.jsonl"), format=python("pair", type="instruction"))
    windows = make_windows([dataset], cache=tmp_path / "cache", seq_len=64)
    assert not modules_in(windows) and windows.identity["order_version"] == 2


@pytest.mark.parametrize("function", ["tagged", "numbered"])
def test_function_that_differs_in_another_process_is_refused(helped: Path, tmp_path: Path, function: str) -> None:
    """The order of a set is another one under another PYTHONHASHSEED; so is what is kept between calls."""
    dataset = DatasetConfig(path=str(tmp_path / "rows.jsonl"), format=python(function, type="completion"))
    with pytest.raises(DataError, match=r"rows\.jsonl:\d+: the format's function, called twice.* sorted\("):
        make_windows([dataset], cache=tmp_path / "cache")
    # A run that an older tree began goes on as it did.
    make_windows([dataset], cache=tmp_path / "cache", order_version=3)


def test_function_is_called_with_decimals(module: Path, tmp_path: Path) -> None:
    """Python's `decimal` imports `numbers`, and a file beside the one that calls it elsewhere has this name."""
    table = pa.table({"q": ["What?"] * 3, "price": pa.array([Decimal("1.50")] * 3, pa.decimal128(5, 2))})
    pq.write_table(table, tmp_path / "rows.parquet")
    module.write_text("def priced(row): return {'text': '{q} {price}'.format(**row)}\n")
    dataset = DatasetConfig(path=str(tmp_path / "rows.parquet"), format=python("priced", type="completion"))
    (window, _) = make_windows([dataset], cache=tmp_path / "cache", seq_len=64).get(0, 0)
    assert "What? 1.50" in demo().decode(window.samples.input_ids[0])


def test_module_whose_code_is_in_no_file_is_refused(helped: Path, tmp_path: Path) -> None:
    helped.write_text(
        "import importlib.util, importlib.machinery, sys, types\n"
        "class Loader:\n"
        "    def create_module(self, spec): return None\n"
        "    def exec_module(self, module): module.ANSWER = 'Yes.'\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        return importlib.machinery.ModuleSpec(name, Loader()) if name.startswith('nowhere') else None\n"
        "sys.meta_path.append(Finder())\n"
        "sys.modules['made_here'] = types.ModuleType('made_here')  # as Cython makes some: this file has its code\n"
        "import nowhere\n"
        "def text(row): return nowhere.ANSWER\n"
    )
    dataset = DatasetConfig(path=str(tmp_path / "rows.jsonl"), format=python("chat"))
    with pytest.raises(DataError, match=r"it imports nowhere, whose code is in no file.* put the code into a file"):
        make_windows([dataset], cache=tmp_path / "cache", seq_len=64)


def test_module_without_source_counts_by_its_file(helped: Path, tmp_path: Path) -> None:
    """Compiled ones, and those in an archive."""
    words = tmp_path / "parts_of_mine/words.py"
    py_compile.compile(str(words), cfile=str(words.with_suffix(".pyc")))
    words.unlink()
    archive = tmp_path / "later.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.write(tmp_path / "later_of_mine.py", "later_of_mine.py")
    (tmp_path / "later_of_mine.py").unlink()
    sys.path.append(str(archive))
    dataset = DatasetConfig(path=str(tmp_path / "rows.jsonl"), format=python("chat"))
    windows = make_windows([dataset], cache=tmp_path / "cache", seq_len=64)
    found = modules_in(windows)
    assert found["parts_of_mine.words"] == xxhash.xxh3_128_hexdigest(words.with_suffix(".pyc").read_bytes())
    assert found["later_of_mine"] == xxhash.xxh3_128_hexdigest(archive.read_bytes())
    assert pickle.loads(pickle.dumps(windows)).get(0, 0)[1]


def test_function_that_cannot_be_called_in_a_fresh_process_is_named(helped: Path, tmp_path: Path) -> None:
    helped.write_text("import sys\nsys.modules['pytest'].fail\ndef text(row): return 'Yes.'\n")
    dataset = DatasetConfig(path=str(tmp_path / "rows.jsonl"), format=python("chat"))
    with pytest.raises(DataError, match=r"rows_of_mine:chat: .*fresh Python process.*KeyError: 'pytest'\); make"):
        make_windows([dataset], cache=tmp_path / "cache", seq_len=64)
