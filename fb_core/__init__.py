"""The FutureBridge method on top of `fb_kernels`: scorer, reranker, decoder.

Names load on first use; those of the verifier are an ImportError without the extra `run`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fb_core.extras import require

if TYPE_CHECKING:
    from fb_core.decoding import CollaborativeDecoder, Generation, LowLatencyDecoder
    from fb_core.engine.engine import Engine
    from fb_core.events import Event, Pool
    from fb_core.http import ServerError
    from fb_core.llm import LocalLLM
    from fb_core.policy import RequestPolicy
    from fb_core.recipe import Deployment, deployment_of
    from fb_core.reranker import TokenReranker
    from fb_core.sampling import Sampling
    from fb_core.scorer import BranchGroup, CompatibilityScorer
    from fb_core.selectors import (
        FutureBridgeSelector,
        LLMPreference,
        RandomChoice,
        Selector,
        SLMPreference,
        State,
    )
    from fb_core.server import ServerLLM
    from fb_core.shared_prefix import shared_prefix_logprobs, shared_prefix_logprobs_many
    from fb_core.targets import future_compatibility, group_targets
    from fb_core.training import (
        GroupMetrics,
        Recipe,
        Run,
        Sweep,
        TrainingGroup,
        TrainingTrajectory,
        train_reranker,
        validate,
    )
    from fb_core.verify import Verdict, Verifier

_HOMES = {
    "fb_core.decoding": ("CollaborativeDecoder", "Generation", "LowLatencyDecoder"),
    "fb_core.engine.engine": ("Engine",),
    "fb_core.http": ("ServerError",),
    "fb_core.llm": ("LocalLLM",),
    "fb_core.policy": ("RequestPolicy",),
    "fb_core.events": ("Event", "Pool"),
    "fb_core.recipe": ("Deployment", "deployment_of"),
    "fb_core.reranker": ("TokenReranker",),
    "fb_core.sampling": ("Sampling",),
    "fb_core.scorer": ("BranchGroup", "CompatibilityScorer"),
    "fb_core.selectors": (
        "FutureBridgeSelector",
        "LLMPreference",
        "RandomChoice",
        "SLMPreference",
        "Selector",
        "State",
    ),
    "fb_core.server": ("ServerLLM",),
    "fb_core.shared_prefix": ("shared_prefix_logprobs", "shared_prefix_logprobs_many"),
    "fb_core.targets": ("future_compatibility", "group_targets"),
    "fb_core.training": (
        "GroupMetrics",
        "Recipe",
        "Run",
        "Sweep",
        "TrainingGroup",
        "TrainingTrajectory",
        "train_reranker",
        "validate",
    ),
    "fb_core.verify": ("Verdict", "Verifier"),
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
    "Pool",
    "RandomChoice",
    "Recipe",
    "RequestPolicy",
    "Run",
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
    if _HOME[name] == "fb_core.verify":
        require(name, "math_verify")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
