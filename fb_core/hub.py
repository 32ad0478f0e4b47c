"""An adapter's folder on the hub: which of its files go there, and how."""

from __future__ import annotations

import os
from pathlib import Path

import yaml
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

from fb_core.decode.deployment import Deployed
from fb_core.rerank.reranker import DESCRIPTION

CARD, WEIGHTS = "README.md", "adapter_model.safetensors"
ADAPTER = ("adapter_config.json", WEIGHTS, DESCRIPTION)
REMEDY = "name a folder that `train` wrote, such as deployed/seed-0 of a run"


def deployed_files(directory: str | os.PathLike[str]) -> list[str]:
    """The sorted names of the files that an adapter needs for deployment, and its model card; only these go to the hub.

    The folder is as `train` writes it: `deployed/seed-0` or `reranker/seed-0` of a run.

    Raises:
        ValueError: no adapter, one without a model card or a threshold, damaged files, links instead of files, or a
            card that the hub would refuse.
    """
    folder = Path(directory)
    deployed = Deployed.load(folder)
    files = [CARD, *ADAPTER]
    for name in files:
        if (folder / name).is_symlink():
            raise ValueError(f"{folder / name}: expected no link in an adapter's folder, got one; put a copy there")
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise ValueError(f"{folder}: expected a deployed adapter with {', '.join(absent)}, got none; {REMEDY}")
    if deployed is None:
        wanted = "the threshold and pool sizes that the adapter was trained for"
        raise ValueError(f"{folder / DESCRIPTION}: expected {wanted}, got none; {REMEDY}")
    _check_weights(folder / WEIGHTS)
    _check_card(folder / CARD)
    return sorted(files)


def push_to_hub(directory: str | os.PathLike[str], repo_id: str, *, private: bool = False) -> str:
    """Upload an adapter's folder to a repository on the hub, made if missing; returns the URL of the commit.

    Args:
        directory: as for `deployed_files`; only those files are sent.
        repo_id: "owner/name".
        private: whether the repository must be private.

    Raises:
        ValueError: as `deployed_files`, not a repository id, or a public repository if `private` is set.
        OSError: the hub cannot be reached, or it refuses.
    """
    files = deployed_files(directory)
    try:
        validate_repo_id(repo_id)
    except HFValidationError as problem:
        raise ValueError(f"repo_id: expected an id such as owner/name, got {repo_id!r}: {problem}") from None
    if constants.HF_HUB_OFFLINE:
        raise OSError(f"{repo_id}: expected the hub within reach, got HF_HUB_OFFLINE=1; unset it to push")
    api = HfApi()
    try:
        repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id  # with its owner
        if private and not api.model_info(repo_id).private:
            raise ValueError(f"{repo_id}: expected a private repository, got a public one; choose another name")
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=directory, allow_patterns=files, commit_message="FutureBridge reranker"
        )
    except (OSError, HTTPError) as problem:
        reason = str(problem).strip().partition("\n")[0]
        raise OSError(
            f"{repo_id}: expected to be written to the hub, got: {reason}; see `hf auth login` and the network"
        ) from problem
    return str(commit.commit_url)


def _check_weights(path: Path) -> None:
    try:
        with safe_open(path, "pt"):
            pass
    except (OSError, SafetensorError) as problem:
        raise ValueError(f"{path}: expected a safetensors file, got {problem}; save the adapter again") from None


def _check_card(path: Path) -> None:
    """Refuse a card whose head is not YAML, or whose base model has no name on the hub."""
    try:
        card = ModelCard.load(path).data.to_dict()
    except (ValueError, yaml.YAMLError) as problem:
        first = str(problem).strip().partition("\n")[0]
        raise ValueError(f"{path}: expected a model card with YAML at its head, got: {first}; fix it") from None
    if "library_name" not in card:
        raise ValueError(f"{path}: expected a model card with a library_name at its head, got none; {REMEDY}")
    base = card.get("base_model")
    for name in base if isinstance(base, list) else [base]:
        try:
            if name is not None:
                validate_repo_id(name)
        except HFValidationError:
            raise ValueError(
                f"{path}: expected the hub id of a model as base_model, got {name!r}; name one, or take the line out"
            ) from None
