"""One rank decides for those that compute together: tensor and context parallel ranks, with experts the whole stage.

They meet in collectives inside every action, so that each choosing for itself would not do. A planned order needs no
leader: it is the same everywhere.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch.distributed as dist

from trimtab.config import ControlConfig
from trimtab.control.client import Client, Offer
from trimtab.control.endpoint import Complaints
from trimtab.control.hub import HUB, Hub
from trimtab.control.opening import limits_of
from trimtab.control.rendezvous import this_host
from trimtab.control.sockets import is_loopback, parse_address
from trimtab.pipeline.execute.leader import Leading, Led
from trimtab.pipeline.policies import Policy
from trimtab.transport.opening import group_exchange

_log = logging.getLogger("trimtab")
_ANY: Final = ("0.0.0.0", "::")
_CONNECT_SECONDS: Final = 30.0
_SECRET_BYTES: Final = 32
_SUBJECT: Final = "pipeline"


class Leadership:
    """This rank's part in it. :meth:`close` it."""

    def __init__(self, control: ControlConfig, groups: Sequence[Any]) -> None:
        """``groups``, one after the other, connect those that compute together; collective over them.

        The hub of the leader listens at the host of ``control.bind``. Raises ValueError where it cannot be reached.
        """
        self._hub: Hub | None = None
        self._client: Client | None = None
        everybody = [int(rank) for rank in _gathered(str(dist.get_rank()), groups)]
        self._alone = len(everybody) == 1
        if self._alone:
            return
        leads = dist.get_rank() == min(everybody)
        offered = json.loads(max(_gathered(self._open(control) if leads else "", groups)))
        if offered["problem"]:
            raise ValueError(offered["problem"])
        if not leads:
            self._join(control, offered)

    def policy(self, policy: Policy) -> Policy:
        """The policy of this rank, where ``policy`` is what decides for all."""
        if self._hub is not None:
            return Leading(policy, self._hub, _SUBJECT)
        if self._client is not None:
            return Led(self._client, HUB, _SUBJECT)
        return policy

    def close(self) -> None:
        """Hang up. May be called again."""
        for endpoint in (self._client, self._hub):
            if endpoint is not None:
                endpoint.close()

    def _open(self, control: ControlConfig) -> str:
        """Start a hub; where it is, for the others."""
        offer: dict[str, Any] = {"problem": "", "host": this_host()}
        try:
            host, _ = parse_address(control.bind)
            secret = secrets.token_bytes(_SECRET_BYTES)
            self._hub = Hub(secret, address=(host, 0), limits=limits_of(control))
            self._hub.start()
            assert self._hub.address is not None
            offer |= {"address": list(self._hub.address), "secret": secret.hex()}
        except (OSError, ValueError) as error:
            offer["problem"] = f"control.bind = {control.bind}: the leader of a stage cannot listen there ({error})"
        return json.dumps(offer)

    def _join(self, control: ControlConfig, offered: Mapping[str, Any]) -> None:
        host, port = offered["address"]
        if is_loopback(host) and offered["host"] != this_host():
            raise ValueError(
                f"ranks of {offered['host']} and {this_host()} compute together, and their leader listens on loopback "
                "only: set control.bind, or pipeline.policy = static"
            )
        offer = Offer(bytes.fromhex(offered["secret"]), ((offered["host"] if host in _ANY else host, port),))
        # that the hub is gone is no news at the end of the job, and before that the policy says it
        quiet = Complaints(_log.info)
        self._client = Client(f"rank-{dist.get_rank()}", lambda: offer, limits=limits_of(control), complaints=quiet)
        self._client.start()
        if not self._client.wait_connected(_CONNECT_SECONDS):
            self._client.close()
            raise ValueError(f"rank {dist.get_rank()} cannot reach the leader of its stage at {host}:{port}")


def computing_together(groups: Any, config: Any) -> list[Any]:
    """The groups of ``groups`` (Megatron-Core's collection) that connect ranks which meet inside actions."""
    kinds = getattr(config, "moe_router_load_balancing_type", "") or ""
    whole_stage = getattr(config, "expert_model_parallel_size", 1) > 1 or "global" in str(kinds)
    return [groups.tp, groups.dp_cp if whole_stage else groups.cp]


def _gathered(text: str, groups: Sequence[Any]) -> list[str]:
    """What all ranks say that the groups connect, each once."""
    known = {text}
    for group in groups:
        if dist.get_world_size(group) > 1:
            for answer in group_exchange(group)(json.dumps(sorted(known)).encode()):
                known.update(json.loads(answer))
    return sorted(known)
