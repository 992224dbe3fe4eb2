# SPDX-License-Identifier: Apache-2.0
"""Linear layers that cannot have an adapter, or an FP8 base, because their owner works with their weight.

The classes are of transformers 5.23, and older or copied ones of the same names. A test searches transformers' code
for more.
"""

from __future__ import annotations

from torch import nn

# {layer's name: classes} that multiply by the weight instead of calling the layer, some by CUDA kernels or in training
WEIGHT_IS_READ = {
    "out_proj": {
        "BambaMixer",
        "FalconH1Mixer",
        "FalconMambaMixer",
        "GraniteMoeHybridMambaLayer",
        "Mamba2Mixer",
        "MambaMixer",
        "NemotronHMamba2Mixer",
        "WavLMAttention",
        "Zamba2MambaMixer",
    },
    "dt_proj": {"FalconMambaMixer", "JambaMambaMixer", "MambaMixer"},
    "x_proj": {"FalconMambaMixer", "MambaMixer"},
    "k_proj": {
        "ConditionalDetrMHAttentionMap",
        "DetrMHAttentionMap",
        "MaskFormerDetrMHAttentionMap",
        "WavLMAttention",
    },
    "k_linear": {"DabDetrMHAttentionMap"},
    "correction_coefs": {"Gemma3nTextAltUp"},
    "classifier": {"LongcatFlashTopkRouter"},
    "rel_pos_bias": {"LayoutLMv2Encoder", "LayoutLMv3Encoder", "PPDocLayoutV2ReadingOrderEncoder"},
    "rel_pos_y_bias": {"LayoutLMv2Encoder", "LayoutLMv3Encoder"},
    "rel_pos_x_bias": {"LayoutLMv2Encoder", "LayoutLMv3Encoder"},
    "decoder": {"MobileBertLMPredictionHead"},
    "dense": {"MobileBertLMPredictionHead"},
    "unembedding_projection": {"NeoMMEForMaskedLM"},
    "kernel": {"TDNNLayer"},
    "v_proj": {"WavLMAttention"},
    "q_proj": {"WavLMAttention"},
}
# {layer's name: classes} that cast to the weight's dtype, or clamp the weight in it. With an FP8 base that would be FP8
DTYPE_IS_READ = {
    "wo": {
        "Kosmos2_5VisionMlp",
        "LongT5DenseActDense",
        "MT5DenseActDense",
        "MT5DenseGatedActDense",
        "Pix2StructTextDenseGatedActDense",
        "Pix2StructVisionMlp",
        "Pop2PianoDenseActDense",
        "Pop2PianoDenseGatedActDense",
        "SwitchTransformersDenseActDense",
        "T5DenseActDense",
        "T5DenseGatedActDense",
        "UMT5DenseActDense",
        "UMT5DenseGatedActDense",
        "UdopDenseActDense",
        "UdopDenseGatedActDense",
    },
    "fc2": {
        "NllbMoeDenseActDense",
        "SeamlessM4TFeedForwardNetwork",
        "SeamlessM4Tv2FeedForwardNetwork",
    },
    "weights_proj": {
        "AXK2Indexer",
        "DeepseekV32Indexer",
        "Dots3NoteTextIndexer",
        "Glm5NextTextIndexer",
        "GlmMoeDsaIndexer",
        "HYV4Indexer",
        "MistralLarge4TextIndexer",
    },
    "lm_head": {
        "FalconMambaForCausalLM",
        "HYV4ForCausalLM",
        "Mamba2ForCausalLM",
        "MambaForCausalLM",
        "xLSTMForCausalLM",
    },
    "prediction_coefs": {"Gemma3nTextAltUp"},
    "input_proj": {"Gemma4VisionPatchEmbedder"},
    "patch_dense": {"Gemma4UnifiedVisionEmbedder"},
    "embedding_projection": {"Gemma4UnifiedMultimodalEmbedder"},
    "patch_embedding": {
        "Cosmos3EdgeVisionEmbeddings",
        "MuseGlimmerVisionPatchEmbedder",
        "MuseSparkVisionPatchEmbedder",
        "Siglip2VisionEmbeddings",
    },
    "proj": {"Ernie4_5_VLMoePatchEmbed", "JevForDecision", "NeoMMEMultiVectorHead"},
    "itm_head": {"Blip2ForImageTextRetrieval"},
    "text_projection": {"Blip2ForImageTextRetrieval", "Blip2TextModelWithProjection"},
    "vision_projection": {"Blip2ForImageTextRetrieval", "Blip2VisionModelWithProjection"},
    "embedding_proj_layer": {
        "ColModernVBertForRetrieval",
        "ColPaliForRetrieval",
        "ColQwen2ForRetrieval",
    },
    "audio_latent_proj": {"GradiumPhononTTSModel", "PocketTTSModel"},
    "audio_prompt_proj": {"GradiumPhononTTSModel", "PocketTTSModel"},
    "input_linear": {"GraniteSpeech5Encoder"},
    "input_layer": {"TimesFm2_5ResidualBlock"},
    "project_q": {
        "UniSpeechForPreTraining",
        "Wav2Vec2ConformerForPreTraining",
        "Wav2Vec2ForPreTraining",
    },
    "atom_linear": {"EsmFold2AtomEncoder"},
    "pae_head": {"EsmFold2ConfidenceHead"},
    "noise_proj": {"EsmFold2DiffusionConditioning"},
    "pair_proj": {"EsmFold2DiffusionConditioning", "EsmFold2LanguageModelEncoder"},
    "coords_linear": {"EsmFold2DiffusionModule"},
    "token_bonds": {"EsmFold2InputEmbedder"},
    "embed": {"EsmFold2MSAEncoder", "EsmFold2RelativePositionEncoding"},
    "distogram_head": {"EsmFold2Model"},
}


def check_owner(model: nn.Module, path: str, fp8: bool) -> None:
    """Refuse an adapter on a layer if its owner works with its weight.

    Args:
        fp8: the base is held in FP8.

    Raises:
        ValueError: the owner reads the weight instead of calling the layer at `path`, or uses its dtype under `fp8`.
    """
    owner, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
    read, dtype = _of(owner, WEIGHT_IS_READ), _of(owner, DTYPE_IS_READ) if fp8 else set()
    place = path.split(".")[
        -2:-1
    ]  # exclude_modules=["wo"] would leave out layers of this name elsewhere, too
    others = [".".join([*place, other]) for other in sorted(read | dtype)]
    kind, leave_out = type(owner).__name__, f"exclude_modules={others!r}"
    if name in read:
        raise ValueError(
            f"target {path!r}: {kind} reads the weight of {name!r} instead of calling it, so an adapter there takes "
            f"no part. Leave it out with {leave_out}"
        )
    if name in dtype:
        raise ValueError(
            f"target {path!r}: {kind} works in the dtype of the weight of {name!r}, which would be FP8. Leave it out "
            f"with {leave_out}, or use fp8=None"
        )


def why_plain(owner: nn.Module, name: str) -> str:
    """Why the layer `name` of `owner` cannot be held in FP8, "" if it can."""
    if name in _of(owner, WEIGHT_IS_READ) | _of(owner, DTYPE_IS_READ):
        return f"{type(owner).__name__} works with its weight"
    return ""


def _of(owner: nn.Module, table: dict[str, set[str]]) -> set[str]:
    """The names in `table` of layers of the owner's class or of a base of it."""
    kinds = {base.__name__ for base in type(owner).__mro__}
    return {name for name, owners in table.items() if owners & kinds}
