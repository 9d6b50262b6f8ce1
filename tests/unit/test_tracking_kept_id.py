"""The file that has a receiver's id of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytune_fsdp.record.copies.following import kept_id


@pytest.mark.parametrize("damage", ["long", "bytes", "link", "directory"])
def test_what_holds_no_id_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    file = tmp_path / "mlflow_run_id"
    assert kept_id(file) == ""
    match damage:
        case "long":
            file.write_text("a" * 2048)
        case "bytes":
            file.write_bytes(b"\xff\xfe")
        case "link":
            file.symlink_to(tmp_path / "elsewhere")
        case "directory":
            file.mkdir()
    assert (
        kept_id(file) == ""
        and not file.exists()
        and (tmp_path / "mlflow_run_id.damaged").is_symlink() == (damage == "link")
    )
    assert f"{file} holds no id (" in caplog.text and "mlflow_run_id.damaged now" in caplog.text
    file.write_text("abc\n")
    assert kept_id(file) == "abc"
