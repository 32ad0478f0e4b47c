"""Settings of the commands that run a pair: `generate`, `chat` and `serve`."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fb_core.apps.settings.base import Dtype, Flavour, Section, ServerUrl, read_settings, validate

if TYPE_CHECKING:
    from fb_core.runtime.sampling import Sampling


def _check_origin(origin: str) -> str:
    if not re.fullmatch(r"\*|(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+", origin):
        words = 'expected "*", or an origin as browsers send it, such as https://chat.example, got another form'
        raise ValueError(f"{words}; write it in small letters, with no path, slash at its end or usual port")
    return origin


class PairSettings(Section):
    """A pair of models that decodes from the command line."""

    slm: str
    """Folder or hub id of the small model; "demo:plans" is a pair of the demo."""
    llm: str | None = None
    """Folder or hub id of the large model; with a server, the model's name there, if the server needs one."""
    server: ServerUrl | None = None
    """URL of an inference server to use instead of a large model in this process."""
    flavour: Flavour = "vllm"
    """The kind of server."""
    api_key_variable: str | None = None
    """Environment variable that holds the server's key, if the server needs one."""
    adapter: str | None = None
    """Folder of an adapter, as `train` writes it; without one, the LLM's likeliest candidate is taken."""
    recipe: Literal["chosen", "published"] = "chosen"
    """The recipe that `train` chose for the adapter, or the published one."""
    threshold: float | None = None
    """Entropy in nats above which the LLM is asked. If left out, the adapter's, or 1 without an adapter; required with
    an adapter that names none."""
    thinking: bool | None = None
    """Whether a chat's answer begins with thinking, where the chat template can switch it. If left out, as the adapter
    was trained; without an adapter, false."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of an answer."""
    max_events: int | None = Field(default=None, ge=0, lt=1 << 31)
    """Maximum events of an answer, never above the adapter's. If left out, the adapter's, else 8."""
    temperature: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Sampling temperature of the small model's own tokens; 0 takes the likeliest. A request to `serve` may have its
    own temperature, top_p, top_k and seed."""
    top_p: float = Field(default=1, gt=0, le=1)
    """Tokens are drawn from the fewest that hold this share of the probability of the `top_k`."""
    top_k: int = Field(default=0, ge=0)
    """Tokens are drawn from this many likeliest, at most the 64 that are known; 0 for all of these."""
    seed: int | None = None
    """Seed of the sampling; the same seed and prompt give the same answer. If left out, another one each time."""
    max_length: int = Field(default=8192, ge=2)
    """Maximum tokens of prompt and answer; memory is allocated for this many."""
    device: str = "auto"
    """cpu, cuda or cuda:1; "auto" takes a GPU if there is one."""
    dtype: Dtype = "auto"
    """Dtype of the weights; "auto" is the checkpoint's own."""

    @model_validator(mode="after")
    def _names_the_llm(self) -> PairSettings:
        if self.llm is None and self.server is None:
            raise ValueError("llm: expected llm or server, got neither; name the large model or its server")
        if self.api_key_variable is not None and self.server is None:
            raise ValueError("api_key_variable: expected a server with it, got none; leave it out")
        return self

    @classmethod
    def load(cls, file: Path | None = None, **given: str | None) -> Self:
        """Load a YAML file, if one is named; settings that are given and not None override its own.

        Raises as `RunSettings.load`.
        """
        options = {name: value for name, value in given.items() if value is not None}
        if file is None:
            return validate(cls, options, "")
        served = {"server": options["server"]} if "server" in options else {}  # then `llm` is a name there, no folder
        return validate(cls, read_settings(file, **served) | options, str(file))

    def sampling(self, request: object = None) -> Sampling | None:
        """How tokens are drawn; None at temperature 0.

        Attributes of the request with the settings' names override them if they are not None; a `top_k` of -1 is 0.
        Without a seed, a new one is drawn.
        """
        from fb_core.runtime.sampling import Sampling  # with torch, which takes a second

        values: dict[str, Any] = {}
        for name in ("temperature", "top_p", "top_k", "seed"):
            value = getattr(request, name, None)
            values[name] = getattr(self, name) if value is None else value
        if not values["temperature"]:
            return None
        if values["seed"] is None:
            values["seed"] = random.SystemRandom().getrandbits(62)
        least = getattr(request, "min_p", None) or 0.0
        return Sampling(**values | {"top_k": max(0, values["top_k"]), "min_p": least})


class ServeSettings(PairSettings):
    """A pair behind OpenAI's API."""

    key_variable: str | None = None
    """Environment variable that holds the key that clients must send; None if no key is needed."""
    max_batch: int = Field(default=32, ge=1)
    """Sequences that run together."""
    kv_memory: int | None = Field(default=None, ge=1)
    """Bytes for keys and values; None for at most half of the free memory."""
    queue: int = Field(default=256, ge=1)
    """Maximum number of sequences that wait or run."""
    body_limit: int = Field(default=1 << 20, ge=1)
    """Maximum bytes of a request."""
    on_llm_error: Literal["raise", "slm"] = "raise"
    """What happens if the large model does not answer: the answer ends with an error ("raise"), or goes on with the
    small model's own token ("slm")."""
    prefill_tokens: int = Field(default=512, ge=1)
    """Maximum prompt tokens prefilled between two steps while others run."""
    served_name: str | None = None
    """The model's name for clients; if left out, `slm`."""
    rerank_prompt: str = "Query: {query}\nDocument: {document}\nDoes the document answer the query, yes or no?\nAnswer:"
    """What the small model reads to rank a document, with the places of query and document."""
    rerank_labels: tuple[str, str] = (" yes", " no")
    """The two answers, of a token each; a document's score is the share of the first."""
    allowed_origin: Annotated[str, AfterValidator(_check_origin)] | None = None
    """Origin of a web page that may use the server from browsers, such as https://chat.example; "*" for any."""

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.served_name or self.slm
