# SPDX-License-Identifier: Apache-2.0
"""Names of other trainers' options that no option of finetune answers to, and the sentence that does."""

from __future__ import annotations

_NAMES = {
    "there is no 4-bit or 8-bit base; the base is in FP8 by default, and --no-fp8 keeps it in --dtype": (
        "load_in_4bit", "load_in_8bit", "load_4bit", "load_8bit", "4bit", "8bit", "bits", "quantization",
        "quantization_bit", "quantization_method", "quantization_config", "quantize", "qlora", "use_qlora", "use_4bit",
        "use_8bit", "double_quantization", "use_nested_quant", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype",
        "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage",
    ),
    "rows are always packed; --no-isolate-documents makes each row causal as a whole": (
        "packing", "eval_packing", "sample_packing", "eval_sample_packing", "neat_packing", "packing_strategy",
        "padding_free", "pad_to_sequence_len", "pad_to_max_length", "group_by_length",
    ),
    "torchrun starts the processes; --shard-base, --cp, --pp and --tp say what they share": (
        "gpus", "num_gpus", "n_gpu", "n_gpus", "nproc_per_node", "num_processes", "world_size", "local_rank",
        "ddp_timeout", "ddp_backend", "deepspeed", "fsdp", "fsdp_config",
    ),
    "every run trains LoRA adapters": (
        "do_train", "stage", "finetuning_type", "task_type", "train_type", "peft_type", "use_peft", "use_lora", "lora",
    ),
    "every run trains new adapters; `lorakernels export` merges an earlier one into a base for --model": (
        "adapter", "adapter_name_or_path", "adapter_path", "adapter_dir", "lora_model_dir", "lora_path", "peft_model",
        "resume_adapter",
    ),
    "finetune trains no whole modules; LoRAConfig.modules_to_save does in a loop of your own": (
        "modules_to_save", "lora_modules_to_save", "additional_target",
    ),
    "the loss covers answers alone by default; --train-on-inputs covers all tokens": (
        "train_on_responses_only", "train_on_completions_only", "completion_only_loss", "assistant_only_loss",
        "mask_prompt",
    ),
    "on a GPU layers are fused and replayed by default; --fuse and --graphs say how": (
        "torch_compile", "unsloth", "use_unsloth", "liger", "liger_kernel", "use_liger", "use_liger_kernel",
        "enable_liger_kernel",
    ),
    "nothing is uploaded; `hf upload REPO OUTPUT/adapter` does it after the run": (
        "push_to_hub", "hub_model_id", "hub_token", "hub_strategy", "hub_private_repo",
    ),
    "the fields of a row say what it is: docs/data.md": (
        "dataset_text_field", "dataset_format", "dataset_type", "text_field", "text_column", "field_messages",
        "conversation_column",
    ),
    "all data are tokenized before the first step, without such an option": (
        "dataloader_num_workers", "preprocessing_num_workers", "dataset_num_proc", "num_workers", "streaming",
        "remove_unused_columns", "overwrite_cache",
    ),
    "an output with checkpoints goes on with --resume; a new run takes another --output": (
        "overwrite_output_dir", "overwrite",
    ),
    "no code from a model's directory is run": ("trust_remote_code",),
    "the tokenizer is that of --model": ("tokenizer", "tokenizer_name", "tokenizer_name_or_path"),
    "the best checkpoint is that of the lowest held-out loss": ("metric_for_best_model", "greater_is_better"),
}  # fmt: skip
ABSENT = {name: why for why, names in _NAMES.items() for name in names}
