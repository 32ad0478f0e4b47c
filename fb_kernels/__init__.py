"""Ops for future-compatibility reranking: branch attention over a shared prefix, log-probs without logits.

Every op is registered with torch.library as `fb::<name>` and has a folder of its own.
"""

from fb_kernels.branch_attention import branch_attention
from fb_kernels.branch_attention_qkv import branch_attention_qkv
from fb_kernels.candidate_head import candidate_head
from fb_kernels.commit import DecodeState, Halt, commit_
from fb_kernels.compatibility_targets import compatibility_targets
from fb_kernels.decoder_layer import LayerWeights, decoder_layer
from fb_kernels.group_cross_entropy import group_cross_entropy
from fb_kernels.joint_pool import joint_pool
from fb_kernels.layout import BranchLayout
from fb_kernels.linear_logprob import combine_logprob_partials, linear_logprob, linear_logprob_partials
from fb_kernels.merge_attention_states import merge_attention_states
from fb_kernels.qk_norm_rope import qk_norm_rope
from fb_kernels.rms_norm import rms_norm
from fb_kernels.skinny_linear import skinny_linear
from fb_kernels.swiglu import swiglu
from fb_kernels.topk_entropy import topk_entropy

__all__ = [
    "BranchLayout",
    "DecodeState",
    "Halt",
    "LayerWeights",
    "branch_attention",
    "branch_attention_qkv",
    "candidate_head",
    "combine_logprob_partials",
    "commit_",
    "compatibility_targets",
    "decoder_layer",
    "group_cross_entropy",
    "joint_pool",
    "linear_logprob",
    "linear_logprob_partials",
    "merge_attention_states",
    "qk_norm_rope",
    "rms_norm",
    "skinny_linear",
    "swiglu",
    "topk_entropy",
]
