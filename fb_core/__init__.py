"""The FutureBridge method on top of `fb_kernels`: scorer, reranker, decoder.

Names load on first use; those of the verifier are an ImportError without the extra `run`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fb_core._util import require

if TYPE_CHECKING:
    from fb_core.decode.decoder import CollaborativeDecoder, Generation, LowLatencyDecoder
    from fb_core.decode.deployment import Deployment, deployment_of
    from fb_core.decode.engine import Engine
    from fb_core.decode.pair import Pair
    from fb_core.decode.policy import RequestPolicy
    from fb_core.decode.selectors import (
        FutureBridgeSelector,
        LLMPreference,
        RandomChoice,
        Selector,
        SLMPreference,
        State,
    )
    from fb_core.events import Event, Pool
    from fb_core.llm.http import ServerError
    from fb_core.llm.local import LocalLLM
    from fb_core.llm.remote import ServerLLM
    from fb_core.rerank.reranker import TokenReranker
    from fb_core.rerank.training import (
        GroupMetrics,
        Optimisation,
        RerankerRun,
        Sweep,
        TrainingGroup,
        TrainingTrajectory,
        train_reranker,
        validate,
    )
    from fb_core.runtime.sampling import Sampling
    from fb_core.score.scorer import BranchGroup, CompatibilityScorer
    from fb_core.score.shared_prefix import shared_prefix_logprobs, shared_prefix_logprobs_many
    from fb_core.score.targets import future_compatibility, group_targets
    from fb_core.verify.verifier import Verdict, Verifier

_HOMES = {
    "fb_core.decode.decoder": ("CollaborativeDecoder", "Generation", "LowLatencyDecoder"),
    "fb_core.decode.engine": ("Engine",),
    "fb_core.llm.http": ("ServerError",),
    "fb_core.llm.local": ("LocalLLM",),
    "fb_core.decode.pair": ("Pair",),
    "fb_core.decode.policy": ("RequestPolicy",),
    "fb_core.events": ("Event", "Pool"),
    "fb_core.decode.deployment": ("Deployment", "deployment_of"),
    "fb_core.rerank.reranker": ("TokenReranker",),
    "fb_core.runtime.sampling": ("Sampling",),
    "fb_core.score.scorer": ("BranchGroup", "CompatibilityScorer"),
    "fb_core.decode.selectors": (
        "FutureBridgeSelector",
        "LLMPreference",
        "RandomChoice",
        "SLMPreference",
        "Selector",
        "State",
    ),
    "fb_core.llm.remote": ("ServerLLM",),
    "fb_core.score.shared_prefix": ("shared_prefix_logprobs", "shared_prefix_logprobs_many"),
    "fb_core.score.targets": ("future_compatibility", "group_targets"),
    "fb_core.rerank.training": (
        "GroupMetrics",
        "Optimisation",
        "RerankerRun",
        "Sweep",
        "TrainingGroup",
        "TrainingTrajectory",
        "train_reranker",
        "validate",
    ),
    "fb_core.verify.verifier": ("Verdict", "Verifier"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BranchGroup",
    "CollaborativeDecoder",
    "CompatibilityScorer",
    "Deployment",
    "Engine",
    "Event",
    "FutureBridgeSelector",
    "Generation",
    "GroupMetrics",
    "LLMPreference",
    "LocalLLM",
    "LowLatencyDecoder",
    "Optimisation",
    "Pair",
    "Pool",
    "RandomChoice",
    "RequestPolicy",
    "RerankerRun",
    "SLMPreference",
    "Sampling",
    "Selector",
    "ServerError",
    "ServerLLM",
    "State",
    "Sweep",
    "TokenReranker",
    "TrainingGroup",
    "TrainingTrajectory",
    "Verdict",
    "Verifier",
    "deployment_of",
    "future_compatibility",
    "group_targets",
    "shared_prefix_logprobs",
    "shared_prefix_logprobs_many",
    "train_reranker",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("futurebridge")
    if name not in _HOME:
        raise AttributeError(f"module 'fb_core' has no attribute {name!r}")
    if _HOME[name] == "fb_core.verify.verifier":
        require(name, "math_verify")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
