# SPDX-License-Identifier: Apache-2.0
"""Every option of ``lorakernels finetune``: its default and its help text, each written once.

The command line, the YAML file and ``--help`` are made from this dataclass. Options of how a run updates, stops and
reports stand in ``running.py``, and checks in ``checks.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lorakernels.train.options.fields import about, option
from lorakernels.train.options.running import RunningOptions

DTYPES = ("auto", "float32", "bfloat16")
RECIPES = ("delayed", "block")
FORMATS = ("bf16", "fp8")
GRAPHS = ("auto", "step", "layer")
SAVE = ("full", "recompute", "fp8", "checkpoint")
ATTENTION = ("auto", "cudnn", "flash", "efficient", "math", "cudnn_graph", "fp8")


@dataclass
class OptionValues(RunningOptions):
    """Options of one run, by name."""

    model: str | None = option(
        None,
        "input and output",
        "model directory: config.json, safetensors weights and tokenizer files; nothing is downloaded "
        "and no code from it is run",
        metavar="DIR",
        brief="folder with config.json, weights and tokenizer",
    )
    demo: bool = option(
        False,
        "input and output",
        "adapt the small byte-level model that comes with the package to the help texts of pydoc",
    )
    data: list[str] = field(
        default_factory=list,
        metadata=about(
            "input and output",
            "data files or folders: rows in .jsonl, .json, .csv, .tsv, .parquet or a folder of the datasets library, "
            "or UTF-8 text, one document each; .gz, .bz2, .xz and .zst are unpacked",
            metavar="FILE",
            brief="files or folders: .jsonl, .csv, .parquet, text, ...",
        ),
    )
    jobs: str | None = option(
        None,
        "input and output",
        "YAML file of several adapters to train at once over one base, instead of data: name: {data, eval_data, lr, r}",
        metavar="FILE",
    )
    output: str | None = option(
        None,
        "input and output",
        "where adapter, checkpoints, metrics.jsonl and loss.png go; the demo's default is demo-output",
        metavar="DIR",
        brief="folder for adapter, checkpoints and loss.png",
    )
    merge: str | None = option(
        None,
        "input and output",
        "also write the merged model to merged/ in the output directory, as lorakernels export does",
        choices=FORMATS,
    )
    resume: bool = option(
        False,
        "input and output",
        "go on from the newest good checkpoint in the output directory",
        brief="go on from the newest checkpoint in --output",
    )

    data_weights: list[float] = field(
        default_factory=list,
        metadata=about(
            "data",
            "how many times an epoch takes the tokens of each entry of data; 0.5 takes half of them",
            metavar="WEIGHT",
        ),
    )
    eval_data: list[str] = field(
        default_factory=list,
        metadata=about(
            "data", "files or folders to evaluate on, instead of a part of data", metavar="FILE"
        ),
    )
    chat_template: str | None = option(
        None,
        "data",
        "Jinja file that writes chats, instead of the tokenizer's own chat template",
        metavar="FILE",
    )
    train_on_inputs: bool = option(
        False,
        "data",
        "the loss of chats and completions covers all tokens, including prompts, not the answers only",
    )
    skip_bad_rows: bool = option(
        False, "data", "count rows that cannot be used and leave them out, instead of stopping"
    )

    r: int = option(16, "adapter", "rank of the adapters", brief="")
    lora_alpha: float = option(
        32.0,
        "adapter",
        "scaling is lora_alpha / r (lora_alpha / sqrt(r) with use_rslora)",
        brief="scaling is lora_alpha / r",
    )
    lora_dropout: float = option(0.05, "adapter", "dropout on the input of lora_A, in [0, 1)")
    target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata=about(
            "adapter",
            "module names to adapt, by PEFT's rules, with spaces or commas between them; all-linear means every linear "
            "layer except the output head",
            metavar="NAME",
            brief="the layers to adapt, by name",
        ),
    )
    exclude_modules: list[str] = field(
        default_factory=list,
        metadata=about("adapter", "module names to leave alone", metavar="NAME"),
    )
    target_parameters: list[str] = field(
        default_factory=list,
        metadata=about(
            "adapter",
            "stacked weights of experts to adapt, experts.gate_up_proj and experts.down_proj; needs lora_dropout 0",
            metavar="NAME",
        ),
    )
    use_rslora: bool = option(False, "adapter", "rank-stabilised scaling")
    use_dora: bool = option(
        False,
        "adapter",
        "train a magnitude for each row, too (DoRA); layers then run eager and unfused",
    )
    init_lora_weights: str = option(
        "true",
        "adapter",
        "true, gaussian, or from the base weight: olora, pissa, pissa_niter_N; these hold what the start leaves of it",
    )
    fp8: bool = option(
        True, "adapter", "hold the frozen base weights in FP8; --no-fp8 keeps them in dtype"
    )
    fp8_recipe: str = option(
        "delayed",
        "adapter",
        "delayed: one scale for each tensor; block: one for each 128 x 128 of a weight and 1 x 128 of activations, "
        "which keeps a block-FP8 checkpoint's bytes",
        choices=RECIPES,
    )

    seq_len: int = option(
        1024, "optimisation", "tokens per packed sequence; longer documents are split", brief=""
    )
    isolate_documents: bool = option(
        True,
        "optimisation",
        "attention does not cross documents packed into one row; without it a row is causal as a whole",
    )
    batch_size: int = option(4, "optimisation", "packed sequences per microbatch", brief="")
    grad_accum: int = option(1, "optimisation", "microbatches per optimizer step")
    steps: int | None = option(None, "optimisation", "optimizer steps; instead of epochs")
    epochs: float = option(
        1.0,
        "optimisation",
        "passes over the training data, when steps is not given",
        brief="passes over the data",
    )
    lr: float = option(2e-4, "optimisation", "peak learning rate", brief="")
    min_lr_ratio: float = option(
        0.1, "optimisation", "learning rate at the last step, as a share of lr"
    )
    warmup: float = option(
        0.03, "optimisation", "warm-up: a share of all steps if below 1, else a number of steps"
    )
    weight_decay: float = option(
        0.0, "optimisation", "weight decay on matrices only, decoupled but for sgd"
    )
    beta1: float = option(
        0.9, "optimisation", "AdamW's decay of the first moment, and sgd's momentum"
    )
    beta2: float = option(0.95, "optimisation", "AdamW's decay of the second moment")
    max_grad_norm: float = option(
        1.0, "optimisation", "clip the gradient norm here; 0 turns clipping off"
    )
    max_bad_steps: int = option(
        10,
        "optimisation",
        "stop after this many steps in a row whose loss or gradient is not finite",
    )
    loss_chunk: int = option(
        2048,
        "optimisation",
        "tokens whose logits exist at the same time (2048 x 128256 bf16 logits are 0.5 GB)",
    )

    eval_fraction: float = option(
        0.05,
        "evaluation",
        "share of the tokens held out, whole documents where possible",
    )
    eval_every: int = option(
        100, "evaluation", "steps between evaluations; 0 evaluates only at start and end"
    )
    eval_rows: int = option(
        256, "evaluation", "packed sequences per evaluation, at most; 0 takes all"
    )

    save_every: int = option(
        100, "checkpoints and logs", "steps between checkpoints; 0 saves only at the end"
    )
    keep: int = option(2, "checkpoints and logs", "checkpoints kept")
    log_every: int = option(
        10,
        "checkpoints and logs",
        "steps between the values that --logger sends; without a terminal, lines come after as many, 10 to 30 s apart",
    )

    fuse: bool | None = option(
        None,
        "runtime",
        "rewire decoder layers into fused kernels where the model allows it; default: on a GPU, but OLMo 2 and Gemma",
    )
    eager: bool = option(
        False,
        "runtime",
        "launch every kernel one by one instead of replaying CUDA graphs on a GPU; slower where the host bounds",
    )
    graphs: str = option(
        "auto",
        "runtime",
        "what one CUDA graph replays: step, a whole optimizer step, or layer, one direction of a decoder layer, which "
        "is slower by a little; auto is step on one GPU and layer on several",
        choices=GRAPHS,
    )
    save: str = option(
        "recompute",
        "runtime",
        "what a fused layer keeps for backward, from fastest to smallest",
        choices=SAVE,
    )
    memory_budget: float | None = option(
        None,
        "runtime",
        "GiB that fused layers may keep for backward together; chooses save layer by layer",
    )
    offload_activations: bool = option(
        False,
        "runtime",
        "keep the largest tensors in pinned host memory: gate and up of --save fp8, or the layer's input of --save "
        "checkpoint; with --memory-budget, where the budget asks for it",
    )
    layout: str = option(
        "given",
        "runtime",
        "auto: shard_base, shard_embeddings, offload, offload_activations and memory_budget are those of the fastest "
        "plan for this model, batch and GPUs, as `lorakernels plan` prints it; given: as the options say",
        choices=("given", "auto"),
    )
    attention: str = option(
        "auto",
        "runtime",
        "attention backend of fused layers; fp8: forward in FP8 and backward in 16 bits, for long rows on a Hopper "
        "GPU, with --no-isolate-documents",
        choices=ATTENTION,
    )
    shared_dropout: bool = option(
        True,
        "runtime",
        "in fused layers, one dropout mask for the adapters of q, k, v and one for the adapters of gate, up",
    )
    cp: int = option(
        1,
        "runtime",
        "context parallel, under torchrun: so many ranks after each other share each row, with seq_len / cp of its "
        "tokens each; fused layers are replayed, others run eager",
    )
    pp: int = option(
        1,
        "runtime",
        "pipeline parallel, under torchrun: so many ranks have the model's layers as stages, and grad_accum "
        "microbatches of a step run through them; with cp, each stage has cp ranks; layers then run eager, or as "
        "graphs with --graphs layer",
    )
    tp: int = option(
        1,
        "runtime",
        "tensor parallel, under torchrun: so many ranks after each other have a part of each linear layer of the "
        "decoder, and train it together on the same rows; fused layers are replayed, others run eager. With "
        "shard_base, ranks of a machine with the same parts keep one copy of them together",
    )
    sequence_parallel: bool = option(
        True,
        "runtime",
        "with tp, each rank has 1 / tp of the tokens between split layers: less memory for norms and activations",
    )
    shard_base: bool = option(
        False,
        "runtime",
        "under torchrun: the GPUs of a machine keep one copy of the FP8 base together, and each layer's weights are "
        "gathered while the layer before runs; the same numbers with less memory",
    )
    shard_embeddings: bool = option(
        False,
        "runtime",
        "with --shard-base: keep the frozen embedding and output head in parts, too, and gather each while it is used; "
        "the same numbers with less memory, and two more gathers a microbatch",
    )
    offload: float = option(
        0.0,
        "runtime",
        "keep at least this fraction of every layer's FP8 base in pinned memory of the host, and copy it to the GPU "
        "two layers ahead; the same numbers with less GPU memory",
        metavar="FRACTION",
    )
    fp8_head: bool = option(False, "runtime", "multiply by the output head in FP8 while training")
    seed: int = option(
        0, "machine", "seed of adapter values, dropout, data order and held-out split"
    )
    dtype: str = option(
        "auto", "machine", "dtype of the base; auto is bfloat16 on a GPU", choices=DTYPES
    )
    device: str = option(
        "auto", "machine", "cpu, cuda or cuda:N; auto takes the first GPU if there is one"
    )
    deterministic: bool = option(
        False,
        "machine",
        "on a GPU take only kernels that give the same bits every time, which a --resume to the bit needs; slower, by "
        "a sixth at Llama-3.1-8B's widths, as attention does without cuDNN and adds up in one order",
    )
    gradient_checkpointing: bool = option(
        False,
        "machine",
        "recompute activations in backward: less memory, slower; layers are not fused then, --save checkpoint does "
        "it fused",
    )
