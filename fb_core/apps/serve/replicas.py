"""Several replicas behind one address: `serve run fb_core.apps.serve.replicas:app slm=... llm=... replicas=2`."""

# No `from __future__ import annotations` here: Ray Serve reads the class of the builder's argument.
from typing import Literal

from pydantic import Field
from ray import serve

from fb_core.apps.serve.app import Application
from fb_core.apps.serve.run import load_server
from fb_core.apps.settings.pair import ServeSettings


class ReplicaSettings(ServeSettings):
    """A pair in several processes; each has the pair's memory and the server's limits for itself."""

    replicas: int = Field(default=1, ge=1)  # processes
    device: Literal["cuda", "cpu"] = "cuda"  # "cuda" gives each replica a GPU of its own, "cpu" a core


@serve.ingress()
class Replica:
    """A process with a pair and the server's routes."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self.server = load_server(settings, loopback=False)

    def __serve_build_asgi_app__(self) -> Application:
        return self.server

    def check_health(self) -> None:
        """Ray Serve calls this periodically, and replaces a replica for which it raises."""
        if self.server.service.engine.closed:
            raise RuntimeError("engine: expected a running one, got a closed one; another replica takes its place")


def app(settings: ReplicaSettings) -> serve.Application:
    """The application that Ray Serve runs.

    Beyond `queue` requests in each replica, as many wait in Ray Serve; any more are refused there (503).
    """
    deployment = serve.deployment(
        Replica,
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.queue,
        max_queued_requests=settings.queue,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(settings.device == "cuda")},
    )
    return deployment.bind(settings)
