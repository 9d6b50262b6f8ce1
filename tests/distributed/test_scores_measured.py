"""An evaluation of scores measures each document once, whatever the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from raytune_fsdp.config import FinetuneConfig
from raytune_fsdp.run.evaluation.score_figures import names_of, of_classes
from tests.ranks import resident_ranks
from tests.scores import OBJECTIVES, documents_in, score_config, twin_of


def _measured(values: dict[str, Any], plain: bool) -> tuple[dict[str, float], list[tuple[list[float], float]]]:
    """What ranks measure, and the scores of the same documents by transformers' own class."""
    from raytune_fsdp.run.assemble import assemble
    from raytune_fsdp.run.prepare import prepare

    config = FinetuneConfig.model_validate(values)
    prepared, standing = prepare(config, dist.get_world_size())
    run = assemble(config, prepared, standing, torch.device("cpu"))
    found = run.exam.values(
        run.model, run.tokenizer, micro_batch=2, layout=run.plan.layout, device=run.device, attention="eager"
    )
    if not plain:
        return found, []
    twin = twin_of(run.model, run.model.get_output_embeddings().weight.detach())  # type: ignore[union-attr, operator]
    ((_, windows),) = prepared.evals.items()
    samples = [sample for k in range(windows.count(0)) for sample in windows.get(0, k)[0].samples]
    documents = [each for sample in samples for each in documents_in(sample)]
    with torch.no_grad():
        return found, [
            (twin(input_ids=torch.tensor([list(each.ids)])).logits[0].tolist(), each.wanted) for each in documents
        ]


@pytest.mark.parametrize("name", ["classification weighted", "reward", "regression"])
def test_figures_are_those_of_all_documents_at_any_world_size(tmp_path: Path, name: str) -> None:
    config = score_config(tmp_path, OBJECTIVES[name], data={"eval": {"fraction": 0.3}})
    (alone, plain), *_ = resident_ranks(_measured, 1, config.model_dump(), True)
    shared = resident_ranks(_measured, 3, config.model_dump(), False)
    for found, _ in shared:
        assert found == pytest.approx(alone, rel=1e-12) and found.keys() == alone.keys()
    (loss,) = (key for key in alone if key.endswith("/loss"))
    place = loss.removesuffix("loss")
    named = {key.rpartition("/")[2] for key in alone}
    assert named >= set(names_of(config.train.objective)) - {"pearson"}
    if name.startswith("classification"):
        scores, wanted = (np.array(each) for each in zip(*plain, strict=True))
        for kind, value in of_classes(scores, wanted).items():
            assert alone[f"{place}{kind}"] == pytest.approx(value, abs=1e-9), kind
        assert len({tuple(scores[row].round(6)) for row in range(len(scores))}) > 10
