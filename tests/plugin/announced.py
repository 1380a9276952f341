"""A leader of four processes without any store, and what it has said."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from dynatrain_megatron.elastic.store import StoreOwner
from dynatrain_megatron.errors import SwitchRefused
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.plugin.leader import Leader
from dynatrain_megatron.policies import Policy
from dynatrain_megatron.transition.posted import Posted

FOUR = ("a", "b", "c", "d")


class Announced:
    """The leader of a job in dp4 that knows nothing but plain data parallelism, and refuses tp5."""

    def __init__(
        self,
        owner: StoreOwner | None = None,
        *,
        waiting: tuple[str, ...] = (),
        lead_steps: int = 0,
        policy: Policy | None = None,
    ) -> None:
        self.posted: list[Posted] = []
        self.answers: list[dict[str, Any]] = []
        self.membership = SimpleNamespace(
            directory=SimpleNamespace(owner=lambda: owner or StoreOwner()),
            answer=lambda number, answer: self.answers.append(answer),
            is_answered=lambda number: False,
            board=SimpleNamespace(post=self.posted.append),
            notices=set(),
            waiting=lambda: waiting,
            requests=[],
            given_up=[],
        )
        store = SimpleNamespace(new_world_ids=lambda count: list(range(count)))
        self.job: Any = SimpleNamespace(
            processes=FOUR,
            layout=ParallelLayout.parse("dp4"),
            iteration=1,
            num_changes=0,
            store=store,
            args=None,
            launch=SimpleNamespace(parsed=None),
        )
        self.leader = Leader(
            self.job,
            self.membership,  # type: ignore[arg-type]
            _feasible,
            lead_steps=lead_steps,
            policy=None,
            launch_layout=self.job.layout,
        )
        self.leader._policy = policy  # of which the model's sizes need not be known

    def after_notices(self, *uids: str) -> tuple[str, ...] | None:
        """The target that is announced once these were told to leave."""
        self.membership.notices |= set(uids)
        self.leader.announce(2, ())
        return self.posted[-1].change.target if self.posted else None

    def asked_for(self, world: int, iteration: int = 2, **more: Any) -> dict[str, Any]:
        """What is answered to a request for so many ranks."""
        self.membership.requests.append((0, json.dumps({"world": world, **more})))
        self.leader.announce(iteration, ())
        return self.answers[-1]

    def give_up(self) -> None:
        """What was announced last has failed."""
        self.job.num_changes = self.posted[-1].change.number
        self.membership.given_up.append(self.posted[-1])


def _feasible(wanted: Any, world: int, at: int = 0) -> ParallelLayout:
    if isinstance(wanted, dict) and wanted.get("tp") == 5:
        raise SwitchRefused("tp*pp*cp=5 must divide world")
    return ParallelLayout(dp=world)
