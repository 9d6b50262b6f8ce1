"""Every recipe that is shipped parses, and the founding one says what its document says."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytune_fsdp.config.load import load_config, recipes
from raytune_fsdp.counts import Census
from raytune_fsdp.errors import ConfigError
from raytune_fsdp.plan import resolve

RECIPES = sorted((Path(__file__).resolve().parents[2] / "jobs" / "recipes").glob("*.yaml"))
assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_parses(recipe: Path) -> None:
    assert load_config(recipe, []).run.name


def test_a_recipe_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(recipes().values()) == RECIPES
    monkeypatch.chdir(tmp_path)
    assert load_config("llama3-8b-full-8xa100").run.name == "llama3-8b-full"
    with pytest.raises(ConfigError, match=r"llama3: no such file .*, and no recipe; there are demo, llama2-"):
        load_config("llama3")
    (tmp_path / "demo").write_text("run: {nme: mine}")
    with pytest.raises(ConfigError, match="nme"):  # a file comes first
        load_config("demo")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_plans_at_its_world_size(recipe: Path) -> None:
    """The file's name ends with its machines (16xa100); the demo runs on two workers."""
    config = load_config(recipe, [])
    world = 2 if recipe.stem == "demo" else int(recipe.stem.rsplit("-", 1)[1].split("x")[0])
    census = Census(seq_len=config.data.seq_len, epochs=(3_000,))
    plan = resolve(config, world, census)
    assert plan.layout.world == world
    assert plan.division.fillers == 0, "a shipped recipe wastes nothing"


def test_the_founding_recipe_has_its_document_s_values() -> None:
    (recipe,) = [path for path in RECIPES if path.stem == "llama2-70b-full-16xa100"]
    config = load_config(recipe, [])
    assert config.model.path == "meta-llama/Llama-2-70b-hf"
    assert (config.train.max_steps, config.train.global_batch, config.train.micro_batch) == (500, 16, 1)
    assert (config.optim.lr, config.optim.warmup_ratio, config.optim.weight_decay) == (5e-5, 0.03, 0.01)
    assert (config.optim.schedule.type, config.data.seq_len) == ("cosine", 2048)
    assert (config.parallel.strategy, config.parallel.precision) == ("full_shard", "bf16")
    assert config.parallel.activation_checkpointing == "full"
    assert config.data.train[0].format.model_dump() == {"type": "completion", "text": "content"}
