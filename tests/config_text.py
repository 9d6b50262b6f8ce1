"""Configs as the text of a file, for the commands that read one."""

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.config.text import dump


def dump_config(config: FinetuneConfig) -> str:
    """Return the whole config as YAML, defaults included."""
    return dump(config.model_dump())  # not its JSON mode, which turns infinities in free-form maps into null
