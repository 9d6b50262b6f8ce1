"""Convert axolotl's options of adapters."""

from __future__ import annotations

from raytune_fsdp.config.sections.method import ALL_LINEAR
from raytune_fsdp.convert.adapters import Lora, Quantized, base_of_flags, carry_lora
from raytune_fsdp.convert.rules import Translation, flag, leave, part, same, settled, text, words

_LORA = Lora(
    owner="adapter", rank="lora_r", alpha="lora_alpha", dropout="lora_dropout", targets="lora_target_modules",
    saved="lora_modules_to_save", parameters="lora_target_parameters", stabilized="peft_use_rslora",
    dora="peft_use_dora", ratio="loraplus_lr_ratio", adapter="lora_model_dir", defaults=(8, 8, 0.0),
)  # fmt: skip


def prepare_method(c: Translation) -> None:
    """Settle what the options of adapters and of their base say together.

    In axolotl of July 2026 `qlora` alone means 4 bits, and so does `lora` with load_in_4bit.
    """
    kind = c.get("adapter", text, "")
    quantized = base_of_flags(c, beside_adapters=kind in ("lora", "qlora"), way_out="write adapter: qlora in the file")
    if kind not in ("lora", "qlora"):
        c.say("adapter", "refused", f"{kind} is not here; lora and qlora are")
        return
    if kind == "qlora":
        if "load_in_4bit" in c.given and quantized is None:
            c.say("adapter", "refused", "load_in_4bit is off: write adapter: lora in the file, or load_in_4bit: true")
        elif quantized is not None and quantized.kind == "int8":
            c.say(quantized.key, "refused", "qlora has 4 bits: write adapter: lora for 8")
        quantized = quantized or Quantized("load_in_4bit", "nf4")
    if c.get("lora_target_linear", flag, False):
        names = c.get("lora_target_modules", words, [])
        if names:
            c.say("lora_target_modules", "refused", "lora_target_linear names all linear layers: drop one of the two")
        c.carry("lora_target_linear", "method.target_modules", ALL_LINEAR)
    for key in ("lora_r", "lora_alpha"):
        c.refuse_unsaid(key, "adapters need it: write it in the file")
    carry_lora(c, _LORA, quantized)


METHOD_OPTIONS = (
    settled("adapter", "`method.type: lora` or `qlora`; others refused"),
    settled("load_in_4bit load_in_8bit", "`method.type: qlora`, `method.quantization: nf4` or `int8`; alone refused"),
    settled("lora_r lora_alpha lora_dropout", "`method.rank`, `alpha`, `dropout`"),
    settled("lora_target_linear lora_target_modules", "`method.target_modules`"),
    settled("lora_target_parameters lora_modules_to_save", "`method.target_parameters`, `modules_to_save`"),
    settled("loraplus_lr_ratio peft_use_dora peft_use_rslora", "`method.lr_ratio`, `dora`, `rank_stabilized`"),
    settled("lora_model_dir", "`method.adapter`"),
    same("lora_fan_in_fan_out peft_ensure_weight_tying", "as the network has it"),
    same(
        "peft_autocast_adapter_dtype",
        "adapters are fp32",
    ),
    leave("loraplus_lr_embedding", "only for adapters of embeddings"),
    leave(
        "lora_on_cpu lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel merge_lora merge_method "
        "qlora_sharded_model_loading",
        "it does not change what is learned",
    ),
    part(
        "lora_rank_pattern lora_alpha_pattern peft peft_layers_to_transform peft_layers_pattern peft_layer_replication "
        "peft_init_lora_weights peft_trainable_token_indices loftq_config bnb_config_kwargs",
        "adapter",
        lambda c: "adapter" in c.given,
    ),
)
