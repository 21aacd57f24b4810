"""Tiny random models of the families of transformers, compared with their own eager attention.

``python -m tests.tiny_models`` compares logits of all families of causal, encoder-decoder and
masked language models: of a batch with padding and without, of more tokens after the cache, of one
more. ``python -m tests.tiny_models mistral llama4`` does some. All take some minutes.
"""

# Models without types.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import collections
import sys
import warnings
from typing import Any, NamedTuple

import torch
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

KINDS = {
    "causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "encoder-decoder": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}

__all__ = ["KINDS", "TOKENS", "Case", "compare", "inputs", "made", "turns"]

TOKENS = 97

# Sizes by the names that configurations have for them; one that a configuration lacks is left out.
BY_SIZE: dict[Any, str] = {
    TOKENS: "vocab_size vocab_size_per_layer_input",
    32: "hidden_size n_embd d_model dim n_embed embedding_size attention_hidden_size lru_width "
    "ple_embed_dim router_hidden_size",
    48: "intermediate_size n_inner ffn_dim d_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim "
    "dff ffn_intermediate_size block_ff_dim intermediate_size_mlp",
    16: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "shared_intermediate_size expert_ffn_hidden_size shared_experts_intermediate_size q_lora_rank "
    "kv_lora_rank o_lora_rank mamba_d_head mamba_head_dim mamba_headdim",
    64: "mamba_d_ssm",
    8: "head_dim global_head_dim kv_channels d_kv attention_head_dim kda_head_dim v_head_dim "
    "qk_nope_head_dim index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim "
    "mamba_d_state ssm_state_size state_size mamba_chunk_size chunk_size "
    "hidden_size_per_layer_input",
    6: "index_topk sliding_window attention_chunk_size attention_window window_size",
    4: "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads "
    "decoder_attention_heads encoder_attention_heads num_experts num_local_experts "
    "n_routed_experts num_decoder_attention_heads num_encoder_attention_heads moe_num_experts "
    "qk_rope_head_dim index_block_size linear_num_value_heads linear_num_heads "
    "linear_conv_kernel_dim mamba_n_heads mamba_num_heads mamba_d_conv mamba_dt_rank rotary_dim "
    "time_step_rank laurel_rank adapter_rank hc_lowrank num_mem_blocks",
    2: "num_key_value_heads n_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_topk "
    "top_k_experts zero_expert_num n_zero_experts o_groups index_n_heads index_topk_blocks "
    "linear_num_key_heads n_mamba_heads max_window_layers no_rope_layer_interval decoder_layers "
    "encoder_layers num_decoder_layers num_dense_layers eos_token_id hc_count",
    1: "n_group topk_group num_expert_group n_groups n_shared_experts first_k_dense_replace "
    "mamba_n_groups mamba_ngroups bos_token_id",
    128: "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length",
    0: "pad_token_id num_kv_shared_layers attention_dropout attn_pdrop dropout hidden_dropout "
    "attention_probs_dropout_prob hidden_dropout_prob embd_pdrop resid_pdrop activation_dropout "
    "attn_dropout embedding_dropout",
}
SIZES = {name: size for size, names in BY_SIZE.items() for name in names.split()}
# No attribute of the name at first, or one that none is to be made of.
OPTIONAL = {"sliding_window", "attention_chunk_size", "head_dim", "q_lora_rank", "rotary_dim"}
OPTIONAL |= {"n_inner", "kv_channels", "num_key_value_heads", "moe_intermediate_size"}
MIXED = ["linear_attention", "full_attention"] * 2
SLIDING = ["sliding_attention", "full_attention"] * 2
EXTRA: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": MIXED, "mlp_layer_types": ["dense"] * 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense"] * 4,
        "per_layer_config": {},
    },
    "gemma4_text": {"layer_types": SLIDING, "head_dim": 8},
    "gemma4_unified_text": {"layer_types": SLIDING, "head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": MIXED},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 1, "num_experts": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": MIXED, "mlp_layer_types": ["dense"] * 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "moe_intermediate_size": 16},
    "llama4_text": {"attention_chunk_size": 6, "no_rope_layer_interval": 2},
    "longcat_flash": {"num_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "prophetnet": {"num_hidden_layers": None},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen4_exp_text": {"hc_count": 2, "ple_layer_ids": [], "moe_intermediate_size": 16},
    "reformer": {"is_decoder": True},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid"] * 4},
}


def _sizes(config: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that make a configuration of this class tiny."""
    found: dict[str, Any] = {}
    for name, size in SIZES.items():
        before = getattr(config, name, ())
        if isinstance(getattr(type(config), name, None), property):
            continue
        is_number = isinstance(before, int | float) or (before is None and name not in OPTIONAL)
        if is_number and (size or not isinstance(before, bool)) and before != 0:
            found[name] = size
    if "qk_rope_head_dim" in found:
        found.pop("head_dim", None)
        found["num_key_value_heads"] = found["num_attention_heads"]
    found |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {name: size for name, size in (found | extra).items() if size is not None}


def made(family: str, kind: Any = None, **more: Any) -> Any:
    """Make a model of a family, whose weights are all drawn."""
    kind = kind or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    kind = kind[0] if isinstance(kind, tuple | list) else kind
    kind = getattr(tf, kind) if isinstance(kind, str) else kind
    maker = kind.config_class or CONFIG_MAPPING[family]
    family = maker.model_type
    config = maker(**_sizes(maker(), EXTRA.get(family, {}) | more))
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind(config).parameters())
    if count > 30_000_000:
        raise MemoryError(f"{count} weights: no names of sizes are known for {family}")
    torch.manual_seed(0)
    model = kind(config).eval()
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data + 0.1 * torch.randn_like(weight)
    return model


class Case(NamedTuple):
    """What became of one family."""

    family: str
    outcome: str
    """Or "own attention" where a model calls none of those that can be chosen."""
    why: str = ""


def turns(model: Any, ids: Any, mask: Any) -> Any:
    """Logits of a prompt, of four tokens after its cache, and of one more; 0 where padding is."""
    with torch.no_grad():
        if type(model).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
            return [model(ids, attention_mask=mask).logits * mask[..., None]]
        memory: dict[str, Any] = {}
        name, name_of_mask = "input_ids", "attention_mask"
        if model.config.is_encoder_decoder:
            encoded = model.get_encoder()(ids, attention_mask=mask)
            memory = {"encoder_outputs": encoded, "attention_mask": mask}
            ids, mask = ids.flip(1), torch.ones_like(mask)
            name, name_of_mask = "decoder_input_ids", "decoder_attention_mask"
        cache: dict[str, Any] = {}
        start, found = 0, []
        for stop in (11, 15, 16):
            given = {name: ids[:, start:stop], name_of_mask: mask[:, :stop], **memory}
            out = model(**given, use_cache=True, **cache)
            found.append(out.logits.masked_fill(mask[:, start:stop, None] == 0, 0))
            held = next((n for n in ("cache", "cache_params", "past_key_values") if n in out), None)
            if held is None:
                return found
            cache, start = {held: out[held]}, stop
    return found


def inputs(padded: bool = True) -> tuple[Any, Any]:
    """Two sequences of 16 tokens, one with padding on the left, and their mask."""
    ids = torch.randint(3, TOKENS, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, : 4 * padded] = 0
    return ids * mask, mask


def _off(found: Any, wanted: Any) -> float:
    size = max(float(array.abs().max()) for array in wanted)
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) / size


def compare(family: str, name: str, kind: Any = None) -> Case:
    """Compare logits with those of eager attention, of prompts with padding and without."""
    model = made(family, kind)
    attend, calls, worst = tf.AttentionInterface()[name], collections.Counter[str](), 0.0

    def counted(*arrays: Any, **given: Any) -> Any:
        calls[name] += 1
        return attend(*arrays, **given)

    tf.AttentionInterface.register("counted", counted)
    tf.AttentionMaskInterface.register("counted", tf.AttentionMaskInterface()[name])
    for given in (inputs(), inputs(padded=False)):
        found: dict[str, Any] = {}
        for attention in ("eager", "sdpa", "counted"):
            try:
                model.set_attn_implementation(attention)
                found[attention] = turns(model, *given)
            except Exception as error:
                if attention == "sdpa":
                    continue
                is_refused = attention != "eager" and isinstance(error, NotImplementedError)
                return Case(
                    family, "refused" if is_refused else f"error ({attention})", repr(error)
                )
        # What a query of padding sees is arbitrary, and recurrent layers pass its output on to
        # others: there eager and sdpa differ, and linattn is like the latter.
        offs = [_off(found["counted"], found[o]) for o in ("eager", "sdpa") if o in found]
        if not min(offs) <= 1e-4:
            return Case(family, "wrong", f"{offs} off")
        worst = max(worst, min(offs))
    return Case(family, "equal" if calls else "own attention", f"{worst:.1g}")


def main(families: list[str]) -> None:
    """Compare families, and count the outcomes."""
    from linattn.interop.transformers import register

    name, counts = register(), collections.Counter[str]()
    for kinds in KINDS.values():
        for family in [f for f in kinds if f in families or not families]:
            try:
                case = compare(family, name, kinds[family])
            except Exception as error:
                case = Case(family, "not made", repr(error))
            counts[case.outcome] += 1
            print(
                case.family, case.outcome, case.why[:250].replace("\n", " "), sep=": ", flush=True
            )
    print(dict(counts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
