"""What goes on beside the requests: news of the job, the end of what nobody wants any more, new links."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

import anyio
import anyio.to_thread

from trimtab.scope.server.service import Service

_LOOK_SECONDS: Final = 1.0
_TIDY_SECONDS: Final = 5.0


@contextlib.asynccontextmanager
async def background(service: Service) -> AsyncGenerator[None]:
    """While the server runs."""
    loop = asyncio.get_running_loop()
    service.hub.begin(lambda: loop.call_soon_threadsafe(service.hub.turn))
    stop = service.listen()
    try:
        async with anyio.create_task_group() as tasks:
            if service.attached:
                tasks.start_soon(_every, _LOOK_SECONDS, lambda: _look(service))
            tasks.start_soon(_every, _TIDY_SECONDS, lambda: tidy(service))
            yield
            tasks.cancel_scope.cancel()
    finally:
        stop()
        service.hub.end()


async def _every(seconds: float, do: Callable[[], Awaitable[None]]) -> None:
    while True:
        await do()
        await anyio.sleep(seconds)


async def _look(service: Service) -> None:
    await anyio.to_thread.run_sync(service.refresh)
    service.show()


async def tidy(service: Service) -> None:
    """Make a new link if it is time to, and end the subscriptions of sessions that are gone."""
    service.renew()
    for subscription in service.abandoned():
        with contextlib.suppress(ValueError):  # the job does not answer: next time
            await anyio.to_thread.run_sync(service.unsubscribe, subscription)
