"""A world of torch.distributed for each thread: its default group, its rank, the groups that it makes.

Within a thread's turn ``dist.init_process_group``, ``dist.get_rank``, ``dist.new_group`` and all collectives are the
thread's own, as if it were a process. Groups are :class:`~trimtab.fbd.threads.group.ThreadGroup`, of a backend that is
registered while a :class:`Worlds` is open.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore

from trimtab.engines.patches import WORLD_PATCH
from trimtab.fbd.threads.group import Launcher, ThreadGroup
from trimtab.fbd.threads.turns import Turns

BACKEND: Final = "trimtab_threads"
_DICTIONARIES: Final = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag", "_tags_to_pg")
_VALUES: Final = ("_backend", "_default_pg_init_method")
_OTHERS: Final = ("_group_count", "_world", "_unregister_process_group")
_GROUPS_OF_A_THREAD: Final = 100_000
"""Names of groups are counted, and a process may have each once: threads count from different numbers on."""

State = tuple[dict[str, Any], dict[str, Any]]
Launchers = Callable[[tuple[int, ...], int], Launcher | None]
"""Of a group, as ranks of its world, and of a member's rank: what begins its collectives; None: begun at once."""


class Worlds:
    """What :class:`~trimtab.fbd.threads.turns.Turns` switch for it; a context manager around them.

    One is open at a time in a process. Give its :attr:`turns` once these are made, before a thread begins.
    """

    def __init__(self, store: Any, timeout: float = 60.0, launchers: Launchers | None = None) -> None:
        """``store``: which all threads of all processes of the world can reach; ``timeout``: seconds until what does
        not come in a collective is an error.

        Raises:
            ValueError: this PyTorch keeps its groups elsewhere.
        """
        problem = WORLD_PATCH.problem()
        if problem is not None:
            raise ValueError(f"threads as ranks: {problem}")
        missing = [name for name in (*_DICTIONARIES, *_VALUES, *_OTHERS) if not hasattr(c10d, name)]
        if missing:
            raise ValueError(f"threads as ranks: this PyTorch has no torch.distributed.distributed_c10d.{missing[0]}")
        self.turns: Turns | None = None
        self._store = store
        self._timeout = timedelta(seconds=timeout)
        self._launchers = launchers
        self._made: dict[int, Counter[tuple[int, ...]]] = {}
        self._stores: dict[int, Any] = {}
        self._groups: list[tuple[Any, ThreadGroup]] = []
        self._excepthook: Any = None

    def __enter__(self) -> Self:
        if BACKEND in dist.Backend.backend_list:
            raise ValueError("ranks of this process already run in threads: one Worlds is open at a time")
        dist.Backend.register_backend(BACKEND, self._make, extended_api=True, devices=["cpu", "cuda"])
        self._excepthook = sys.excepthook  # init_process_group puts its own in its place
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave all groups, and forget the backend."""
        while self._groups:
            name, group = self._groups.pop()
            group.shutdown()
            with contextlib.suppress(RuntimeError):  # a thread has destroyed it
                vars(c10d)["_unregister_process_group"](name)
        sys.excepthook = self._excepthook
        plugins: dict[str, Any] = dist.Backend._plugins
        plugins.pop(BACKEND.upper(), None)
        dist.Backend.backend_list.remove(BACKEND)
        for table in (dist.Backend.backend_type_map, dist.Backend.backend_capability):
            table.pop(BACKEND, None)  # pyright: ignore[reportArgumentType]
        defaults = dist.Backend.default_device_backend_map
        for device in [one for one, name in defaults.items() if name == BACKEND]:
            del defaults[device]

    def initialize(self, rank: int, world: int) -> None:
        """In a thread: ``dist.init_process_group`` as ``rank`` of ``world`` threads."""
        dist.init_process_group(BACKEND, store=self._own(), rank=rank, world_size=world, timeout=self._timeout)

    # --- switched

    def fresh(self, member: int) -> State:
        """See :class:`~trimtab.fbd.threads.turns.Switched`."""
        names: dict[str, Any] = {name: {} for name in _DICTIONARIES} | dict.fromkeys(_VALUES)
        names["_group_count"] = (1 + member) * _GROUPS_OF_A_THREAD
        return names, dict(vars(type(c10d._world)()))

    def swap(self, state: State) -> State:
        """See :class:`~trimtab.fbd.threads.turns.Switched`."""
        names, world = state
        module: dict[str, Any] = c10d.__dict__
        before = {name: module[name] for name in names}, dict(vars(c10d._world))
        module.update(names)
        vars(c10d._world).clear()
        vars(c10d._world).update(world)
        return before

    def _make(self, options: Any, _: Any = None) -> ThreadGroup:
        """A group, in a thread's turn. Its members find each other by its ranks, and by how many of the same there
        were before, which they make in the same order."""
        own, turns = self._own(), self.turns
        assert turns is not None
        assert turns.member is not None
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        made = self._made.setdefault(turns.member, Counter())
        made[ranks] += 1
        key = f"threads/{'-'.join(map(str, ranks))}/{made[ranks]}"
        rank = ranks[options.group_rank]
        launcher = self._launchers(ranks, rank) if self._launchers else None
        store = PrefixStore(key, own)
        group = ThreadGroup(store, options.group_rank, options.group_size, self._timeout, turns, launcher)
        self._groups.append((options.group_id, group))
        return group

    def _own(self) -> Any:
        """The store's client of the thread that asks: one that waits on a client keeps others from using it."""
        member = None if self.turns is None else self.turns.member
        if member is None:
            raise ValueError(f"backend {BACKEND} is for threads that take turns")
        if member not in self._stores:
            if not hasattr(self._store, "clone"):
                raise ValueError("threads as ranks need a PyTorch whose stores have clone()")
            self._stores[member] = self._store.clone()
        return self._stores[member]
