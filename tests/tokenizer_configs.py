"""What `tokenizer_config.json` says in well-known families of models, as their makers or transformers wrote it.

Templates are shortened, and tables of added tokens; the names of arguments and the kinds of their values are theirs.
"""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]


def added(content: str, **changes: Any) -> Values:
    """A token as transformers 4 wrote it into a config."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **flags, **changes}


def decoder(*tokens: str, first: int = 0) -> Values:
    """`added_tokens_decoder`, by the ids that the tokens have."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {str(first + number): {"content": token, **flags} for number, token in enumerate(tokens)}


LONG = 1000000000000000019884624838656
CHAT = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sp_model_kwargs": {}, "legacy": False}
HUB = "/admin/home-hailey/.cache/huggingface/hub/models--EleutherAI--gpt-neox-20b/snapshots/4e49eadb5d14bd22f314"
BERT = {
    "do_lower_case": True, "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]",
    "mask_token": "[MASK]", "tokenize_chinese_chars": True, "strip_accents": None, "never_split": None,
}  # fmt: skip

BYTES: dict[str, Values] = {
    "llama 3": {
        "added_tokens_decoder": decoder("<|endoftext|>"), "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
        "chat_template": CHAT, "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 131072,
        "clean_up_tokenization_spaces": True, "tokenizer_class": "PreTrainedTokenizerFast",
    },
    "qwen 2": {
        "add_prefix_space": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "bos_token": None,
        "chat_template": CHAT, "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
        "model_max_length": 32768, "pad_token": "<|endoftext|>", "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    },
    "qwen 3": {
        "add_bos_token": False, "additional_special_tokens": ["<|im_start|>", "<|vision_start|>"], "bos_token": None,
        "eos_token": "<|im_end|>", "errors": "replace", "extra_special_tokens": {}, "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer", "chat_template": CHAT + "{{ '</think>' }}",
        "tool_parser_type": "qwen3_coder",
    },
    "qwen 2.5 vl": {
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "processor_class": "Qwen2_5_VLProcessor",
        "tokenizer_class": "Qwen2Tokenizer", "errors": "replace",
    },
    "mistral nemo": {
        "add_bos_token": True, "add_prefix_space": None, "legacy": True, **SPECIAL, "is_local": True,
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": LONG, "spaces_between_special_tokens": False,
    },
    "phi 2": {
        "add_prefix_space": False, **SPECIAL, "clean_up_tokenization_spaces": True, "return_token_type_ids": False,
        "model_max_length": 2048, "tokenizer_class": "CodeGenTokenizer",
    },
    "phi 4": {**SPECIAL, "add_prefix_space": False, "chat_template": CHAT, "tokenizer_class": "GPT2Tokenizer"},
    "gpt2": {"model_max_length": 1024},
    "pythia": {
        **SPECIAL, "add_prefix_space": False, "tokenizer_class": "GPTNeoXTokenizer",
        "name_or_path": "EleutherAI/gpt-neox-20b", "special_tokens_map_file": f"{HUB}/special_tokens_map.json",
    },
    "gpt-j": {
        **{key: added("<|endoftext|>", normalized=True) for key in ("unk_token", "bos_token", "eos_token")},
        "add_prefix_space": False, "errors": "replace", "model_max_length": 2048, "name_or_path": "gpt2",
        "from_slow": True, "special_tokens_map_file": None, "tokenizer_class": "GPT2Tokenizer",
    },
    "codegen": {**SPECIAL, "add_prefix_space": False, "name_or_path": "Salesforce/codegen-350M-mono",
                "special_tokens_map_file": None, "tokenizer_class": "CodeGenTokenizer"},
    "falcon": {
        "add_prefix_space": False, "eos_token": "<|endoftext|>", "model_max_length": 2048,
        "name_or_path": "tiiuae/falcon_tokenizer", "special_tokens_map_file": None,
        "tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"],
    },
    "mpt": {**SPECIAL, "add_prefix_space": False, "clean_up_tokenization_spaces": True, "model_max_length": 2048,
            "tokenizer_class": "GPTNeoXTokenizer"},
    "bloom": {
        "unk_token": "<unk>", "eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>", "add_prefix_space": False,
        "name_or_path": "bigscience/tokenizer", "special_tokens_map_file": None,
        "tokenizer_class": "BloomTokenizerFast",
        "padding_side": "left",
    },
    "opt": {
        "errors": "replace", **{key: added("</s>", normalized=True) for key in ("unk_token", "bos_token", "eos_token")},
        "pad_token": added("<pad>"), "add_prefix_space": False, "add_bos_token": True, "special_tokens_map_file": None,
        "name_or_path": "patrickvonplaten/opt-30b", "tokenizer_class": "GPT2Tokenizer",
    },
    "stablelm": {**SPECIAL, "add_prefix_space": False, "tokenizer_class": "GPTNeoXTokenizer", "model_max_length": 2048},
    "starcoder 2": {**SPECIAL, "add_prefix_space": False, "additional_special_tokens": ["<fim_prefix>", "<repo_name>"],
                    "clean_up_tokenization_spaces": True, "tokenizer_class": "GPT2Tokenizer", "vocab_size": 49152},
    "deepseek v3": {
        "add_bos_token": True, "add_eos_token": False, "bos_token": added("<|endoftext|>"), "pad_token": added("<pad>"),
        "eos_token": added("<|endoftext|>"), "unk_token": None, "legacy": True, "model_max_length": 131072,
        "sp_model_kwargs": {}, "tokenizer_class": "LlamaTokenizerFast", "chat_template": CHAT,
    },
    "olmo 2": {**SPECIAL, "add_prefix_space": False, "pad_token": "<|pad|>", "tokenizer_class": "GPT2Tokenizer",
               "extra_special_tokens": {}},
    "command r": {
        "add_bos_token": True, "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>",
        "chat_template": [{"name": "default", "template": CHAT}, {"name": "tool_use", "template": CHAT}],
        "legacy": True, "merges_file": None, "model_max_length": LONG, "sp_model_kwargs": {}, "unk_token": None,
        "spaces_between_special_tokens": False, "tokenizer_class": "CohereTokenizer",
        "use_default_system_prompt": False,
        "vocab_file": None,
    },
    "granite": {**SPECIAL, "add_prefix_space": False, "errors": "replace", "padding_side": "left",
                "tokenizer_class": "GPT2Tokenizer", "vocab_size": 49152},
    "smollm": {**SPECIAL, "add_prefix_space": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
               "chat_template": CHAT, "tokenizer_class": "GPT2Tokenizer", "vocab_size": 49152},
    "gpt-oss": {
        "bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>",
        "extra_special_tokens": {}, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": LONG,
        "added_tokens_decoder": decoder("<|endoftext|>"), "response_schema": {"type": "object", "x-regex": "<a>/b"},
    },
    "glm 4": {
        "additional_special_tokens": ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "/nothink"],
        "do_lower_case": False,
        "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "padding_side": "left", "remove_space": False,
        "tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"],
    },
    "nemotron": {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast",
                 "clean_up_tokenization_spaces": True, "model_max_length": LONG},
    "exaone": {**SPECIAL, "tokenizer_class": "GPT2Tokenizer", "chat_template": CHAT, "add_prefix_space": False},
    "mamba": {**SPECIAL, "add_prefix_space": False, "tokenizer_class": "GPTNeoXTokenizer",
              "added_tokens_decoder": decoder("<|endoftext|>")},
    "lfm 2": {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>", "legacy": False,
              "sp_model_kwargs": {}, "tokenizer_class": "PreTrainedTokenizerFast", "use_default_system_prompt": False},
    "dolly": {
        **SPECIAL, "add_prefix_space": False,
        "additional_special_tokens": ["### End", "### Instruction:"], "name_or_path": "EleutherAI/pythia-12b",
        "special_tokens_map_file": "/fsx/home-hailey/.cache/huggingface/hub/models--EleutherAI--gpt-neox-20b/map.json",
        "tokenizer_class": "GPTNeoXTokenizer",
    },
    "roberta": {
        "errors": "replace", "add_prefix_space": False, "trim_offsets": True, "model_max_length": 512,
        "bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "mask_token": added("<mask>"),
        "unk_token": "<unk>", "pad_token": "<pad>", "tokenizer_class": "RobertaTokenizer",
        "tokenizer_file": "/home/patrick/.cache/huggingface/transformers/tokenizer.json",
        "name_or_path": "roberta-base",
    },
    "whisper": {
        **SPECIAL, "pad_token": "<|endoftext|>", "add_prefix_space": False, "errors": "replace", "language": None,
        "predict_timestamps": False, "processor_class": "WhisperProcessor", "return_attention_mask": False,
        "task": None,
        "dropout": 0.0, "tokenizer_class": "WhisperTokenizer",
    },
    "saved by transformers 5": {
        "backend": "tokenizers", "is_local": True, "local_files_only": False, "model_max_length": 4096,
        "model_specific_special_tokens": {"image_token": "<image>"}, "image_token": "<image>", **SPECIAL,
        "tokenizer_class": "TokenizersBackend", "padding_side": "right", "max_length": 512, "stride": 0,
        "truncation_side": "right", "truncation_strategy": "longest_first", "pad_to_multiple_of": None,
    },
}  # fmt: skip
"""Of tokenizers on bytes."""

PIECES: dict[str, Values] = {
    "llama 2": {
        "add_bos_token": True, "add_eos_token": False, "bos_token": added("<s>"), "eos_token": added("</s>"),
        "clean_up_tokenization_spaces": False, "legacy": False, "model_max_length": LONG, "pad_token": None,
        "padding_side": "right", "sp_model_kwargs": {}, "tokenizer_class": "LlamaTokenizer",
        "unk_token": added("<unk>"),
    },
    "code llama": {
        **LLAMA, "eot_token": "▁<EOT>", "fill_token": "<FILL_ME>", "middle_token": "▁<MID>", "prefix_token": "▁<PRE>",
        "suffix_token": "▁<SUF>", "suffix_first": False, "tokenizer_class": "CodeLlamaTokenizer",
        "model_max_length": LONG,
    },
    "mistral": {
        **LLAMA, "additional_special_tokens": [], "chat_template": CHAT, "spaces_between_special_tokens": False,
        "tokenizer_class": "LlamaTokenizer", "use_default_system_prompt": False,
        "added_tokens_decoder": decoder("<unk>", "<s>", "</s>"),
    },
    "mixtral": {**LLAMA, "additional_special_tokens": [], "use_default_system_prompt": True, "pad_token": None,
                "tokenizer_class": "LlamaTokenizer"},
    "gemma 2": {
        "add_bos_token": True, "add_eos_token": False, "additional_special_tokens": ["<start_of_turn>",
        "<end_of_turn>"],
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "sp_model_kwargs": {},
        "spaces_between_special_tokens": False, "tokenizer_class": "GemmaTokenizer", "use_default_system_prompt": False,
    },
    "gemma 3": {
        "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>",
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "sp_model_kwargs": None,
        "extra_special_tokens": {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>"},
        "processor_class": "Gemma3Processor", "tokenizer_class": "GemmaTokenizer", "model_max_length": LONG,
    },
    "phi 3": {**LLAMA, "bos_token": "<s>", "chat_template": CHAT, "padding_side": "left", "model_max_length": 131072,
              "tokenizer_class": "LlamaTokenizer", "use_default_system_prompt": False},
    "vicuna": {**LLAMA, "add_bos_token": True, "padding_side": "right", "tokenizer_class": "LlamaTokenizer"},
    "tinyllama": {**LLAMA, "chat_template": CHAT, "model_max_length": 2048, "tokenizer_class": "LlamaTokenizer",
                  "use_default_system_prompt": False, "trust_remote_code": False},
    "yi": {**LLAMA, "model_max_length": 4096, "tokenizer_class": "LlamaTokenizer", "pad_token": "<unk>"},
    "jamba": {**LLAMA, "add_bos_token": True, "tokenizer_class": "LlamaTokenizer", "chat_template": CHAT},
    "zephyr": {
        **LLAMA, "additional_special_tokens": ["<unk>", "<s>", "</s>"], "truncation_side": "left", "device_map": "auto",
        "tokenizer_class": "LlamaTokenizer", "use_default_system_prompt": True,
    },
}  # fmt: skip
"""Of tokenizers in the manner of SentencePiece."""

WORDS: dict[str, Values] = {
    "bert": {**BERT, "tokenizer_class": "BertTokenizer", "model_max_length": 512, "do_basic_tokenize": True,
             "name_or_path": "bert-base-uncased", "special_tokens_map_file": None},
    "bge": {**BERT, "tokenizer_class": "BertTokenizer", "max_length": 512, "stride": 0, "pad_to_multiple_of": None,
            "pad_token_type_id": 0, "truncation_side": "right", "truncation_strategy": "longest_first"},
    "minilm": {
        **BERT, "tokenizer_class": "BertTokenizer", "name_or_path": "nreimers/MiniLM-L6-H384-uncased",
        "tokenizer_file": "/home/nils/.cache/tokenizer.json", "init_inputs": [],
        "special_tokens_map_file": "/root/.cache/huggingface/transformers/dd8bd9bfd3664b530ea4e645105f5577",
    },
    "electra": {**BERT, "tokenizer_class": "ElectraTokenizer", "model_max_length": 512},
}  # fmt: skip
"""Of tokenizers of words and their parts."""

FAMILIES = {**BYTES, **PIECES, **WORDS}
NAME_FILES = {
    "pythia": ["name_or_path", "special_tokens_map_file"], "gpt-j": ["name_or_path"], "codegen": ["name_or_path"],
    "falcon": ["name_or_path"], "bloom": ["name_or_path"], "opt": ["name_or_path"], "bert": ["name_or_path"],
    "dolly": ["name_or_path", "special_tokens_map_file"], "roberta": ["tokenizer_file", "name_or_path"],
    "minilm": ["name_or_path", "tokenizer_file", "special_tokens_map_file"],
}  # fmt: skip
"""What some of them say that names a file or a model elsewhere, or did where they were written."""
