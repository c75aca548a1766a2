"""The settings of publishing weights to servers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishConfig:
    """The settings of the way in which new weights come to servers."""

    store: str = "shared"
    """The source of weights for servers. shared: servers read each version in ``rollout.transfer_dir``, which they and
    the trainer see. Otherwise each server's machine pulls the changes into its own memory: from that directory
    (directory), from the trainer's machines (http), or from the object store at this URL (s3://..., gs://...)."""
    host: str = "127.0.0.1"
    """The address of process 0's machine that ``store: http`` binds to: a loopback address, or a private one with
    ``rollout.api_key_file``. Each other process serves its part of the weights at the address from which its machine
    reaches process 0."""
    port: int = 0
    """The port of ``store: http`` on process 0; 0 takes a free one. Process i has ``port`` + i."""

    readable_by: str = "owner"
    """The users who may read the weights on the disk. owner: the user of the run. group:NAME: also the members of this
    group. all: every user of the machines that see the directory. Servers that run as another user need one of these,
    unless they pull with ``store: http`` or from an object store."""

    @property
    def versions(self) -> int:
        """The most room on a disk that a run's versions and deltas take together, in multiples of the weights' size."""
        return 3 if self.store in ("directory", "http") else 2

    def __post_init__(self) -> None:
        kind, _, group = self.readable_by.partition(":")
        if kind not in ("owner", "group", "all") or (kind == "group") != bool(group):
            raise ValueError(f"readable_by must be owner, group:NAME or all, got {self.readable_by!r}")
        if self.store not in ("shared", "directory", "http") and "://" not in self.store:
            raise ValueError(f"store must be shared, directory, http or a URL, got {self.store!r}")
        if self.store.startswith(("http://", "https://")):
            raise ValueError(f"store must be http, with host and port, for weights that are served, got {self.store!r}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be in 0..65535, got {self.port}")
