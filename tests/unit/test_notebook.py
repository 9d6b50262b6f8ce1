"""docs/start/first_run.ipynb: its cells in their order, in one process that is no script, as in a notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "start" / "first_run.ipynb"

PLAY = """
import json, sys
from pathlib import Path

for number, cell in enumerate(json.loads(Path(sys.argv[1]).read_text())["cells"]):
    source = "".join(cell["source"])
    first, _, rest = source.partition("\\n")
    if cell["cell_type"] == "code" and first.startswith("%%writefile "):
        Path(first.removeprefix("%%writefile ")).write_text(rest)
    elif cell["cell_type"] == "code":
        exec(compile(source, f"cell {number}", "exec"), globals())
assert not hasattr(sys.modules["__main__"], "__file__")
"""


def test_it_is_a_notebook_without_outputs() -> None:
    found = json.loads(NOTEBOOK.read_text())
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    for cell in found["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"] == [] and cell["execution_count"] is None)


@pytest.mark.slow
def test_its_cells_run_in_an_empty_directory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAY, str(NOTEBOOK)], cwd=tmp_path, capture_output=True, text=True, check=False,
        timeout=600, env={**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 60 loss 0.0" in done.stdout and "60 steps, from " in done.stdout
    assert done.stdout.rstrip().endswith("Ada has the keys.")
