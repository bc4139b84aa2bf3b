"""Where leaves lie along a pipeline axis before a step has been looked at: each on the rank of its stage.

`layers="pp"` puts the index of a list of layers on a mesh axis. A layer's leaves then lie on one rank of that axis, and
what mirrors them there too. A training step cuts the layers by what they cost (`compiler/stages.py`) and puts the other
parameters where they are read first. A function that sees no step, such as an init, cuts by numbers of parameters, puts
what stands before the layers on the first rank and what stands behind them on the last. Arrays that lie on another rank
than a step wants are moved when they come in; arrays of an earlier step lie right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fparallel.array import Array
from fparallel.errors import ShardingError
from fparallel.mesh import Mesh
from fparallel.rules import LeafPlan
from fparallel.schedule.orders import balance, find_order

DEFAULT_AXIS, DEFAULT_ORDER = "pp", "1f1b"


@dataclass(frozen=True)
class Staging:
    """The pipeline axis of a function, its order, and the ranks that arrays decide (by list and index of a layer)."""

    axis: str
    ranks: int
    order: str
    given: dict[tuple[str, int], int] | None = None

    @staticmethod
    def of(
        plans: Sequence[LeafPlan], mesh: Mesh, order: str | None, leaves: Sequence[Any] | None
    ) -> Staging | None:
        """The staging that the layers of some leaves ask for, or None.

        Args:
          leaves: the arguments of `plans`, where arrays decide on the ranks; None where costs decide.
        """
        axes = {plan.layer.axis: plan for plan in plans if plan.layer is not None}
        if len(axes) > 1:
            first, second = list(axes.values())[:2]
            raise ShardingError(
                f"the layers of {first.path} lie on another axis than those of {second.path}",
                fix="put all layers on one pipeline axis",
            )
        axis = next(iter(axes), DEFAULT_AXIS if mesh.shape.get(DEFAULT_AXIS, 1) > 1 else None)
        if axis is None:
            return None
        given = None
        if leaves is not None:
            given = {
                (plan.layer.list, plan.layer.index): leaf.home
                for plan, leaf in zip(plans, leaves, strict=False)
                if plan.layer is not None and isinstance(leaf, Array) and leaf.home is not None
            }
        return Staging(axis, mesh.shape[axis], order or DEFAULT_ORDER, given or None)

    def lengths(self, plans: Sequence[LeafPlan]) -> dict[str, int]:
        """By list of layers how many it has."""
        lengths: dict[str, int] = {}
        for plan in plans:
            if plan.layer is not None:
                known = max(plan.layer.length, plan.layer.index + 1)
                lengths[plan.layer.list] = max(lengths.get(plan.layer.list, 0), known)
        return lengths

    def settle(self, plans: Sequence[LeafPlan]) -> None:
        """Gives every parameter and what mirrors it the pipeline rank that it has without a step."""
        lists = self.lengths(plans)
        order, chunks = find_order(self.order, self.ranks)
        stages = self.ranks * chunks
        costs: dict[tuple[str, int], float] = {(name, i): 0.0 for name, n in lists.items() for i in range(n)}
        own = [
            plan for plan in plans if not plan.mirrors and (plan.layer is not None or plan.role == "params")
        ]
        behind = False
        for plan in own:
            if plan.layer is not None:
                behind = True
                costs[plan.layer.list, plan.layer.index] += plan.numel
            elif behind and costs:
                costs[list(costs)[-1]] += plan.numel
        place = order.place(self.ranks, chunks)
        rank: dict[tuple[str, int], int] = {}
        if costs:
            if len(costs) < stages:
                raise ShardingError(
                    f"{', '.join(lists)}: {len(costs)} layer{'s' * (len(costs) > 1)} cannot make {stages} stages "
                    f"({self.axis}={self.ranks}" + (f", {chunks} chunks a rank)" if chunks > 1 else ")"),
                    fix=f"use a smaller {self.axis} axis or fewer chunks, or more layers",
                )
            rank = dict(zip(costs, (place[s] for s in balance(list(costs.values()), stages)), strict=True))
        homes: dict[str, int] = {}
        behind = False
        for plan in own:
            if plan.layer is not None:
                behind = True
                plan.home = rank[plan.layer.list, plan.layer.index]
            else:
                plan.home = place[-1] if behind else place[0]
            homes[plan.path] = plan.home
        for plan in plans:
            if plan.mirrors in homes:
                plan.home = homes[plan.mirrors]
