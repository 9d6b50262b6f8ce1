"""Each optimizer against another's, or a plain one, on one rank; and rounding that is right on average."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config

from raytune_fsdp.base.errors import ConfigError
from raytune_fsdp.config import FinetuneConfig, OptimConfig
from raytune_fsdp.config.sections.optimizers import state_bytes
from raytune_fsdp.run.prepare import prepare
from raytune_fsdp.run.resume import identity_of
from raytune_fsdp.step.optim.adafactor import _means
from raytune_fsdp.step.optim.build import build_optimizer
from raytune_fsdp.step.optim.groups import check_groups
from raytune_fsdp.step.optim.matrices import hidden_matrices
from raytune_fsdp.step.optim.moments import EightBit, is_quantized
from raytune_fsdp.step.optim.muon import orthogonal
from raytune_fsdp.step.optim.update import LEVELS, Noise, drawn, to_bf16
from tests.models import build
from tests.runs import make_config
from tests.unit.test_plan import config

GO = torch.tensor(0.0)


def optim(kind: str, **values: Any) -> OptimConfig:
    mine = {key: values.pop(key) for key in list(values) if key not in OptimConfig.model_fields}
    return OptimConfig.model_validate({"optimizer": {"type": kind, **mine}, **values})


def gradients(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


def apart(name: str, ours: OptimConfig, theirs: Callable[[Any, list[Any], list[Any]], Any], steps: int = 4) -> float:
    """The largest difference of a weight after some steps of both, in fp64."""
    models = [build(name).double(), build(name).double()]
    optimizer = build_optimizer(models[0], ours)
    decays = {name for group in optimizer.groups if group.weight_decay for name in group.names}  # type: ignore[attr-defined]
    split: tuple[list[Any], list[Any]] = ([], [])
    for key, parameter in models[1].named_parameters():
        split[key not in decays].append(parameter)
    other = theirs(models[1], *split)
    for step in range(1, steps + 1):
        for model in models:
            gradients(model, step)
        for group in other.param_groups:
            group["lr"] = ours.lr / step
        optimizer.step(1 / step, GO)
        other.step()
    return max(float((a - b).detach().abs().max()) for a, b in zip(*(m.parameters() for m in models), strict=True))


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_torch_s(nesterov: bool) -> None:
    ours = optim("sgd", momentum=0.8, nesterov=nesterov, lr=0.1, weight_decay=0.0)
    assert apart("gpt2", ours, lambda m, *_: torch.optim.SGD(m.parameters(), momentum=0.8, nesterov=nesterov)) < 1e-14
    # Decay beside the momentum and decay inside the gradient are the same where there is no momentum.
    plain = optim("sgd", momentum=0.0, lr=0.1, weight_decay=0.3)
    assert apart("gpt2", plain, lambda m, decays, rest: torch.optim.SGD(_two(decays, rest, 0.3))) < 1e-14


def _two(decays: list[Any], rest: list[Any], decay: float) -> list[dict[str, Any]]:
    return [{"params": decays, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]


def test_adamw_written_out_is_torch_s() -> None:
    """With moments in fp32 beside weights in fp64 only these are rounded; the rule itself is torch's."""
    from raytune_fsdp.step.optim.elementwise import AdamWRule, Elementwise
    from raytune_fsdp.step.optim.groups import groups_of, trained
    from raytune_fsdp.step.optim.update import Trained

    ours = OptimConfig(lr=0.1, weight_decay=0.3, beta2=0.9)
    models = [build("gpt2").double(), build("gpt2").double()]
    fused = build_optimizer(models[0], ours)
    groups = groups_of(models[1], ours)
    weights = Trained(trained(models[1]), groups, lr=0.1, seed=0, stochastic_rounding=False)
    written = Elementwise(weights, AdamWRule(ours, "as_weights"))
    for step in range(1, 5):
        for model, optimizer in zip(models, (fused, written), strict=True):
            gradients(model, step)
            optimizer.step(1 / step, GO)
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        assert torch.allclose(one, other, rtol=1e-13, atol=1e-15)


def test_lion_is_the_plain_one() -> None:
    ours = OptimConfig.model_validate(
        {"optimizer": {"type": "lion", "beta1": 0.9, "beta2": 0.95}, "lr": 0.1, "weight_decay": 0.3}
    )
    model, plain = build("gpt2").double(), build("gpt2").double()
    optimizer = build_optimizer(model, ours)
    decays = {name for group in optimizer.groups if group.weight_decay for name in group.names}  # type: ignore[attr-defined]
    means = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for step in range(1, 5):
        gradients(model, step)
        gradients(plain, step)
        optimizer.step(1 / step, GO)
        with torch.no_grad():
            for name, p in plain.named_parameters():
                assert p.grad is not None
                p *= 1 - 0.1 / step * (0.3 if name in decays else 0.0)
                p -= 0.1 / step * torch.sign(0.9 * means[name] + 0.1 * p.grad)
                means[name] = 0.95 * means[name] + 0.05 * p.grad
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_adafactor_is_transformers(name: str) -> None:
    """torch's has another clip of small numbers, and a rate that follows the size of the weight."""
    from transformers.optimization import Adafactor

    ours = optim("adafactor", lr=0.1, weight_decay=0.3)
    assert apart(
        name, ours,
        lambda m, decays, rest: Adafactor(_two(decays, rest, 0.3), lr=0.1, relative_step=False, scale_parameter=False),
    ) < 1e-12  # fmt: skip


def test_muon_is_torch_s() -> None:
    """To the digits of bf16, in which torch iterates: for a matrix that is not fused, and the rest by AdamW."""
    ours = optim("muon", lr=0.05, weight_decay=0.3, eps=1e-6)
    matrices = hidden_matrices(build("llama"))
    model, other = build("llama"), build("llama")
    optimizer = build_optimizer(model, ours)
    named = dict(other.named_parameters())
    muon = torch.optim.Muon(
        [named[name] for name in matrices], lr=0.05, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"
    )
    rest = [name for name in named if name not in matrices]
    head = [named["lm_head.weight"]]
    adamw = torch.optim.AdamW(_two(head, [named[n] for n in rest if n != "lm_head.weight"], 0.3), lr=0.05, eps=1e-6)
    for step in range(1, 4):
        gradients(model, step)
        gradients(other, step)
        optimizer.step(1.0, GO)
        muon.step()
        adamw.step()
    for name, parameter in model.named_parameters():
        moved = parameter - dict(build("llama").named_parameters())[name]
        off = float(((parameter - named[name]).norm() / moved.norm()).detach())
        assert off < (0.02 if name in matrices else 1e-5), name


def test_the_singular_values_become_one() -> None:
    for shape in ((40, 64), (64, 40)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        values = torch.linalg.svdvals(orthogonal(matrix, 10))
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        made = left.T @ orthogonal(matrix, 5) @ right.T
        assert float((made - made.diag().diag()).abs().max()) < 1e-12, "the directions stay"


@pytest.mark.parametrize(
    ("name", "of", "shapes"),
    [
        ("llama", "model.layers.0.self_attn.k_proj.weight", [(16, 32)]),
        ("gpt2", "transformer.h.1.attn.c_attn.weight", [(32, 32)] * 3),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", [(32, 32), (16, 32), (16, 32)]),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", [(64, 32), (64, 32)]),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", [(4, 8, 32)] * 3),
        ("bloom", "transformer.h.0.self_attention.query_key_value.weight", [(4, 8, 32)] * 3),
        ("mpt", "transformer.blocks.0.attn.Wqkv.weight", [(32, 32)] * 3),
        ("mixtral", "model.layers.0.mlp.experts.gate_up_proj", [(64, 32), (64, 32)]),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", [(32, 64), (32, 64)]),
    ],
)
def test_of_which_matrices_a_tensor_is_made(name: str, of: str, shapes: list[tuple[int, ...]]) -> None:
    model = build(name)
    found = hidden_matrices(model)
    whole = dict(model.named_parameters())[of]
    pieces = found[of](whole[0] if whole.ndim == 3 else whole)
    assert [tuple(piece.shape) for piece in pieces] == shapes
    assert sum(piece.numel() for piece in pieces) == (whole[0] if whole.ndim == 3 else whole).numel()
    strange = [n for n in found if any(w in n for w in ("embed", "lm_head", "norm", "router", ".gate.", "wte", "bias"))]
    assert not strange
    if name == "gpt_neox":  # the queries of head 1 are rows 24 to 32
        assert torch.equal(pieces[0][1], whole[24:32])


# ---- rounding ----


def noise_of(noise: Noise, step: torch.Tensor, first: int, rows: int, columns: int) -> torch.Tensor:
    """The noise of these rows and columns at a step."""
    return drawn(noise.at(first, 0, step.device), step, torch.empty(rows, columns, device="meta"))


def test_noise_is_looked_up_by_place_and_even() -> None:
    noise = Noise(3, "layers.0.weight", "weight")
    step = torch.tensor(5.0)
    whole = noise_of(noise, step, 0, 300, 400)
    assert torch.equal(noise_of(noise, step, 100, 7, 400), whole[100:107]), "whatever rows a rank has"
    assert int(whole.min()) >= 0 and int(whole.max()) < LEVELS
    for other in (
        noise_of(noise, torch.tensor(6.0), 0, 300, 400),
        noise_of(Noise(4, "layers.0.weight", "weight"), step, 0, 300, 400),
        noise_of(Noise(3, "layers.1.weight", "weight"), step, 0, 300, 400),
        noise_of(Noise(3, "layers.0.weight", "exp_avg"), step, 0, 300, 400),
        whole.roll(1, 0),
        whole.roll(1, 1),
    ):
        both = torch.corrcoef(torch.stack([whole.flatten(), other.flatten()]).double())
        assert abs(float(both[0, 1])) < 5 / math.sqrt(whole.numel())
    counts = torch.bincount(whole.flatten() >> 8, minlength=256).double()
    expected = whole.numel() / 256
    assert float(((counts - expected) ** 2 / expected).sum()) < 255 + 6 * math.sqrt(2 * 255), "evenly"


def test_bf16_is_right_on_average() -> None:
    noise = noise_of(Noise(0, "w", "weight"), torch.tensor(1.0), 0, 1000, 100)
    for value in (1.0003, -3.01, 1e-20, 0.0, math.inf):
        rounded = to_bf16(torch.full((1000, 100), value), noise).double()
        assert len(rounded.unique()) <= 2
        if math.isinf(value) or not value:
            assert bool((rounded == value).all())
        else:
            step = abs(value) / 128
            assert abs(float(rounded.mean()) - value) < 5 * step / math.sqrt(rounded.numel())


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("columns", [768, 256, 40])
def test_eight_bits_are_near_and_right_on_average(squares: bool, columns: int) -> None:
    kept = EightBit(squares=squares)
    tables, groups = kept.tables(torch.device("cpu")), (60, -(-columns // 256), min(256, columns))
    value = torch.randn(groups, generator=torch.Generator().manual_seed(0)) ** (2 if squares else 1) * 1e-9
    value[3] = 0.0
    noise = noise_of(Noise(0, "w", "exp_avg"), torch.tensor(1.0), 0, 60, columns).view(groups)
    stored = kept.write(value, tables, noise)
    assert stored[""].dtype == torch.uint8 and stored["_scale"].shape == (*groups[:2], 1)
    back = kept.read(stored, tables, torch.float32)
    root, wanted = (back.sqrt(), value.sqrt()) if squares else (back, value)
    largest = stored["_scale"]
    assert bool(((root - wanted).abs() <= (0.0079 if squares else 0.0158) * largest).all())
    assert abs(float(((root - wanted) / largest.clamp(min=1e-38)).mean())) < 2e-4
    assert bool((back[3] == 0).all())
    if squares:
        assert bool((root[value > 0] > 0).all()), "else a first moment would be divided by eps alone"
    shares = kept.write(value[10:13], tables, noise[10:13])
    assert torch.equal(shares[""], stored[""][10:13]), "a rank that has some rows keeps the same of them"


@pytest.mark.parametrize("squares", [False, True])
def test_a_code_is_the_last_level_that_is_not_above(squares: bool) -> None:
    """It is found by a root; at levels and just beside them a search finds the same."""
    kept = EightBit(squares=squares)
    tables = kept.tables(torch.device("cpu"))
    levels = tables["levels"]
    beside = [torch.nextafter(levels, torch.full_like(levels, way)).clamp(-1, 1) for way in (-2.0, 2.0)]
    share = torch.cat([levels, *beside, torch.rand(4096) * 2 - 1, torch.tensor([1.0, math.nan])])
    share = share.abs() if squares else share
    below = torch.searchsorted(levels, share, right=True).sub(1).clamp(0, len(levels) - 2)
    # Each in a group of its own, beside a 1 that makes the scale 1; in fp64, in which squares of fp32 are exact.
    groups = torch.stack([share, torch.ones_like(share)], -1)[:, None].double()
    never_up = torch.full(groups.shape, LEVELS)
    codes = kept.write(groups**2 if squares else groups, tables, never_up)[""][:, 0, 0].long()
    assert torch.equal(codes, torch.where((below == 0) & (share > 0), 1, below) if squares else below)


def test_small_weights_are_not_quantized() -> None:
    assert is_quantized(torch.empty(64, 64)) and is_quantized(torch.empty(2, 64, 64))
    assert not is_quantized(torch.empty(64, 63)) and not is_quantized(torch.empty(100_000))
    assert not is_quantized(torch.empty(100_000, 1)), "five bytes a number instead of four"


def learn(stochastic: bool, *, lr: float = 1e-3, steps: int = 400) -> float:
    """The mean distance of bf16 weights from where the gradient leads them, after steps of a quarter of a digit."""
    config = OptimConfig(lr=lr, weight_decay=0.0, beta2=0.9, stochastic_rounding=stochastic)
    torch.manual_seed(0)
    model: Any = build("llama").bfloat16().requires_grad_(False)
    weight = model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    optimizer = build_optimizer(model, config)
    with torch.no_grad():
        weight.fill_(1.0)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight) * (weight.detach() - 0.75).sign()
        optimizer.step(1.0, GO)
    return float((weight.detach().float() - 0.75).abs().mean())


def test_stochastic_rounding_learns_where_plain_bf16_stalls() -> None:
    """Between 0.5 and 1 a step of bf16 is 0.004; an update of 0.001 is rounded away, every time."""
    assert learn(stochastic=False) == 0.25, "not one weight has moved"
    assert learn(stochastic=True) < 0.01


# ---- what is refused ----


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": {"type": "sgd"}, "eps": 1e-6}, r"optim.eps=1e-06: means nothing to optim.optimizer.type=sgd"),
        ({"optimizer": {"type": "lion"}, "beta2": 0.9}, r"set it back to 0.999; lion's own is optim.optimizer.beta2"),
        ({"optimizer": {"type": "adafactor"}, "beta1": 0.5}, r"optim.beta1=0.5: means nothing to .*adafactor"),
        (
            {"optimizer": {"type": "sgd", "nesterov": True, "momentum": 0}},
            r"optimizer.nesterov=true with optim.optimizer.momentum=0: .* set momentum to 0.9",
        ),
        ({"groups": [{"match": "("}]}, r"match: '\(' is not a regular expression"),
    ],
)
def test_settings_without_a_meaning_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig.model_validate(values)


def test_the_mean_of_a_wide_row_does_not_depend_on_how_many_rows_a_rank_has() -> None:
    """Threads share a row that is alone."""
    rows, threads = torch.rand(3, 100_000, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together, ends = _means(rows, -1, 3), [(0, 1), (1, 3), (2, 3)]
        assert all(torch.equal(_means(rows[a:b], -1, 3), together[a:b]) for a, b in ends)
        assert not all(torch.equal(_means(rows[a:b], -1, 0), together[a:b]) for a, b in ends)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "lion", "muon", "adafactor"])
def test_what_a_run_writes_down_can_be_read_again(kind: str) -> None:
    """With every field in it, also those that this optimizer does not have."""
    before = config(optim={"optimizer": {"type": kind}})
    assert FinetuneConfig.model_validate(before.model_dump()) == before


def test_stochastic_rounding_is_of_bf16_weights() -> None:
    with pytest.raises(ValueError, match=r"optim.stochastic_rounding=true with parallel.precision=bf16: only weights"):
        config(optim={"stochastic_rounding": True})
    assert config(optim={"stochastic_rounding": True}, parallel={"precision": "bf16_pure"})


def test_a_run_of_before_is_the_same_run() -> None:
    """The identity of AdamW names nothing that older runs did not; moments in fp32 may be said beside fp32 weights."""

    def identity(**sections: Any) -> dict[str, Any]:
        asked: Any = SimpleNamespace(identity={})
        return identity_of(config(**sections), GPT2Config(), asked)

    plain = identity()
    assert not {"optim.optimizer", "optim.groups", "optim.stochastic_rounding"} & plain.keys()
    said = {"optimizer": {"type": "adamw", "moments": "fp32"}, "groups": [], "stochastic_rounding": False}
    assert identity(optim=said) == plain
    assert identity(optim=said, parallel={"precision": "bf16_pure"})["optim.optimizer"] == said["optimizer"]
    other = identity(optim={"optimizer": {"type": "sgd"}, "groups": [{"match": "a"}]})
    assert other["optim.optimizer"] == {"type": "sgd", "momentum": 0.9, "nesterov": False}
    assert other["optim.groups"] == [{"match": "a", "lr_ratio": 1.0, "weight_decay": None}]


def test_bytes_of_state() -> None:
    def of(weight: int, **values: Any) -> float:
        return state_bytes(OptimConfig.model_validate({"optimizer": values}).optimizer, weight)

    assert of(4, type="adamw") == 8 and of(2, type="adamw") == 4 and of(2, type="adamw", moments="fp32") == 8
    assert of(4, type="adamw", moments="8bit") == 2.03125 and of(4, type="adafactor") == 0
    assert of(4, type="sgd") == 4 and of(4, type="sgd", momentum=0) == 0 and of(4, type="muon") == 4
    for moments, expected in (("8bit", 2.03125), ("bf16", 4.0), ("fp32", 8.0)):
        model = build("llama", hidden_size=256, intermediate_size=512, head_dim=64)
        optimizer = build_optimizer(
            model, OptimConfig.model_validate({"optimizer": {"moments": moments, "type": "adamw"}})
        )
        optimizer.init_state()
        name = "model.layers.0.mlp.up_proj.weight"
        kept = [t.nbytes for key, t in optimizer.state_tensors().items() if key.startswith(f"{name}.exp")]
        assert sum(kept) == expected * dict(model.named_parameters())[name].numel()


# ---- groups ----


def test_the_first_pattern_that_is_found_decides() -> None:
    chosen = OptimConfig.model_validate(
        {
            "weight_decay": 0.3,
            "groups": [
                {"match": r"layers\.0\.", "lr_ratio": 0.1},
                {"match": "mlp|norm", "weight_decay": 0.05},
            ],
        }
    )
    model = build("llama")
    check_groups(model, chosen)
    found = {
        name: (group.lr_ratio, group.weight_decay)
        for group in build_optimizer(model, chosen).groups  # type: ignore[attr-defined]
        for name in group.names
    }
    assert found.keys() == dict(model.named_parameters()).keys()
    assert found["model.layers.0.mlp.up_proj.weight"] == (0.1, 0.3), "the first, and only it"
    assert found["model.layers.0.input_layernorm.weight"] == (0.1, 0.0)
    assert found["model.layers.1.mlp.up_proj.weight"] == (1.0, 0.05)
    assert found["model.layers.1.input_layernorm.weight"] == (1.0, 0.05), "what is written comes before the rule"
    assert found["model.layers.1.self_attn.q_proj.weight"] == (1.0, 0.3)


def test_a_pattern_multiplies_what_lora_plus_says() -> None:
    from raytune_fsdp.config import LoraMethod

    peft = pytest.importorskip("peft")
    model = build("llama")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj"]), model)
    chosen = OptimConfig.model_validate({"groups": [{"match": r"layers\.1\.", "lr_ratio": 0.5}]})
    groups = build_optimizer(model, chosen, LoraMethod(type="lora", lr_ratio=16)).groups  # type: ignore[attr-defined]
    found = {name: group.lr_ratio for group in groups for name in group.names}
    at = "model.layers.{}.self_attn.q_proj.lora_{}.default.weight"
    assert found == {at.format(0, "A"): 1, at.format(0, "B"): 16, at.format(1, "A"): 0.5, at.format(1, "B"): 8}


def test_a_pattern_that_finds_nothing_is_refused() -> None:
    model = build("gpt2")  # the head is the embedding: it has both names
    check_groups(model, OptimConfig.model_validate({"groups": [{"match": "lm_head", "lr_ratio": 0.1}]}))
    for groups, message in (
        (
            [{"match": "q_proj"}],
            r"optim.groups.0.match: 'q_proj' is found in the name of no weight that is trained; in ",
        ),
        ([{"match": "attn"}, {"match": "c_attn"}], r"optim.groups.1.match: 'c_attn' finds only weights that a group "),
    ):
        with pytest.raises(ConfigError, match=message):
            check_groups(model, OptimConfig.model_validate({"groups": groups}))
    model.transformer.wte.requires_grad_(False)
    with pytest.raises(ConfigError, match="transformer.h.0.attn.c_attn.weight"):
        check_groups(model, OptimConfig.model_validate({"groups": [{"match": "wte"}]}))


def test_a_pattern_is_checked_before_a_run(tmp_path: Path) -> None:
    asked = make_config(tmp_path, optim={"groups": [{"match": "no_such_layer", "lr_ratio": 0.1}]})
    with pytest.raises(
        ConfigError, match=r"'no_such_layer' is found in the name of no weight .* transformer.wte.weight"
    ):
        prepare(asked, 1)
